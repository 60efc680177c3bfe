"""The program behind `tunesmith merge`: `python -m trainers.tools.merge FOLDER`.

FOLDER has the file `request.json` (see `MergeRequest`); the result is written to its subfolder `result`.
The last line on stdout is a JSON document: the facts about the result, or `mistakes`, with exit status 2.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainers.checkpoint.export import export
from trainers.checkpoint.export_check import LoadedBack
from trainers.checkpoint.scratch import Scratch, map_weights
from trainers.checkpoint.weights import OTHER_BASE, base_digest
from trainers.config.mistakes import ConfigError
from trainers.config.objectives import OBJECTIVES
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.config.parse import Request
from trainers.data.tokenizer import load_tokenizer
from trainers.model.adapter import load_start
from trainers.model.load import build_unread, stored_dtype
from trainers.run.errors import TrainingError
from trainers.run.folder import write_json
from trainers.run.from_run import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Source, adapted_modules, resolve_request
from trainers.run.json_file import load_json
from trainers.run.lineage import EXPORT_RECORD, base_of, read_export
from trainers.run.manifest import sha256
from trainers.run.merging import REQUEST, RESULT, Merge, MergeRequest, draws, merge_stage
from trainers.run.model_card import History
from trainers.run.weight_headers import read_header
from trainers.tools.merge_weights import build_merged, load_config


def merge(request: MergeRequest, work: Path) -> dict[str, Any]:
    """Merges models into the folder `result` in `work`.

    Returns:
        `dtype`, `loss_difference`, `check`, `rank` and `deviation` (None for full weights).

    Raises:
        ConfigError: if they cannot be merged.
        TrainingError: if the result, loaded back, is another model.
    """
    _refuse_other_tokenizer(request)
    models = [
        {"name": model.name, "weight": model.weight,
         "stages": [asdict(stage) for stage in read_export(Path(model.folder))[1]],
         "files": {path.name: sha256(path) for path in Source(Path(model.folder)).files()}}
        for model in request.models
    ]  # fmt: skip
    how = Merge(request.method, models, request.density, request.seed if draws(request.method) else None,
                command=request.command)  # fmt: skip
    history = History([merge_stage(request)], merge=how)
    checked, how = (_merge_adapters if request.is_adapter else _merge_full)(request, work, history, how)
    facts = {"dtype": checked.dtype, "loss_difference": checked.difference, "check": str(checked)}
    return facts | {"rank": how.rank, "deviation": how.deviation}


def _merge_full(request: MergeRequest, work: Path, history: History, how: Merge) -> tuple[LoadedBack, Merge]:
    objective = _objective(request)
    configs = [load_config(model.folder, objective) for model in request.models]
    base = load_config(request.base, objective, request.revision or None) if request.base else None
    dtype = _dtype(request, configs[0], base)
    config = configs[0].model_copy(update={"export_dtype": str(dtype).removeprefix("torch.")})
    described: dict[str, Any] = _template_date(request)
    if base is not None:
        described |= {"model_name_or_path": request.base, "model_revision": base.model_revision}
    build = partial(build_merged, configs, base if request.needs_base else None, request, dtype)
    its_config = config.model_copy(update=described)
    return export(build, config, work / RESULT, "full", {}, None, history, its_config), how


def _merge_adapters(request: MergeRequest, work: Path, history: History, how: Merge) -> tuple[LoadedBack, Merge]:
    from trainers.tools.merge_adapters import merge_adapters  # peft takes long

    first = Path(request.models[0].folder)
    config, recorded = _adapter_config(first), read_export(first)[0]
    folder, rank, deviation = merge_adapters(request, config, work / "adapter")
    load_tokenizer(config).save_pretrained(folder)
    targets = adapted_modules(load_json(folder / ADAPTER_CONFIG), read_header(folder / ADAPTER_WEIGHTS))
    write_json(folder / EXPORT_RECORD, {"config": {**recorded, "lora_target_modules": targets}})
    dtype = "float32" if request.dtype == "auto" else request.dtype
    config = _adapter_config(folder).model_copy(update={"export_dtype": dtype})
    how = replace(how, rank=rank, deviation=deviation)
    history = replace(history, merge=how, base=_checked_base(config, request))
    described = config.model_copy(update={"from_run": None, **_template_date(request)})
    build = partial(_with_adapter, config)
    return export(build, config, work / RESULT, "adapter", {}, None, history, described), how


def _adapter_config(folder: Path) -> TrainConfig:
    """The config that loads an adapter on its base, in the compute dtype that it was trained with."""
    recorded = read_export(folder)[0]
    options = {"dataset_name": EMBEDDED, "packing": False, "gradient_checkpointing": False, "from_run": str(folder),
               "mixed_precision": recorded.get("mixed_precision", "no"), "lora_dropout": 0.0}  # fmt: skip
    config = resolve_request(Request(options=options))
    return config.model_copy(update={"mixed_precision": "no"}) if config.mixed_precision == "fp8" else config


def _with_adapter(config: TrainConfig, scratch: Scratch) -> nn.Module:
    """The base with the adapter that the config starts from, its weights mapped from their files."""
    model, stored = build_unread(config)
    load_start(config, model)
    map_weights(model, stored, scratch)
    return model


def _checked_base(config: TrainConfig, request: MergeRequest) -> str:
    """The digest of the base's weights.

    Raises:
        ConfigError: if an adapter was trained on other weights. Digests depend on which modules are adapted, so only
            those of the same ones are compared.
    """
    digest = base_digest(*build_unread(config))
    for model in request.models:
        recorded, _ = read_export(Path(model.folder))
        trained_on = base_of(Path(model.folder))
        alike = sorted(recorded.get("lora_target_modules") or []) == sorted(config.lora_target_modules)
        if trained_on and alike and trained_on != digest:
            raise ConfigError(f"{model.name}: {OTHER_BASE}; restore {config.model_name_or_path}")
    return digest


def _objective(request: MergeRequest) -> str:
    """The objective that says which head the models have: of reward models theirs, otherwise `sft`."""
    heads = {}
    for model in request.models:
        objective = str(read_export(Path(model.folder))[0].get("objective") or "")
        heads[model.name] = objective if objective in OBJECTIVES and OBJECTIVES[objective].scalar_head else "sft"
    if len(set(heads.values())) > 1:
        listed = ", ".join(f"{name} ({head})" for name, head in heads.items())
        raise ConfigError(f"reward models have another head than language models: {listed}; merge one kind")
    return next(iter(heads.values()))


def _template_date(request: MergeRequest) -> dict[str, Any]:
    recorded = read_export(Path(request.models[0].folder))[0]
    return {name: recorded[name] for name in ("template_date",) if name in recorded}


def _dtype(request: MergeRequest, first: TrainConfig, base: TrainConfig | None) -> torch.dtype:
    """The dtype of merged full weights."""
    if request.dtype != "auto":
        dtype: torch.dtype = getattr(torch, request.dtype)
        return dtype
    try:
        return stored_dtype(base if request.like_base and base is not None else first)
    except (ConfigError, OSError, ValueError):  # the base is gone
        return stored_dtype(first)


def _refuse_other_tokenizer(request: MergeRequest) -> None:
    """Raises ConfigError for models whose tokenizers or chat templates differ: the result can have only one."""
    first: dict[str, Any] = {}
    objective = "sft" if request.is_adapter else _objective(request)
    for model in request.models:
        folder = Path(model.folder)
        try:
            config = _adapter_config(folder) if request.is_adapter else load_config(folder, objective)
            tokenizer = load_tokenizer(config)
        except ConfigError as error:
            raise ConfigError(error.mistakes, source=model.name) from None
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        parts = {
            "vocabulary": {**content, "padding": None, "truncation": None},
            "chat template": tokenizer.chat_template,
            "special tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        }
        first = first or parts
        if other := [name for name, part in parts.items() if part != first[name]]:
            problem = f"{model.name} has another {' and another '.join(other)} than {request.models[0].name}"
            raise ConfigError(f"{problem}; the result can have only one, so train them with the same")


def main(argv: list[str]) -> int:
    """Merges as the request in a folder says; returns the exit status."""
    work = Path(argv[0])
    try:
        facts = merge(MergeRequest.read(work / REQUEST), work)
    except ConfigError as error:
        print("\n".join(error.lines), file=sys.stderr)
        print(json.dumps({"mistakes": error.as_json()}), flush=True)
        return 2
    except TrainingError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(facts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
