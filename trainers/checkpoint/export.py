"""Exports weights in the formats of transformers and peft: adapter, merged or full, with tokenizer and model card.

`python -m trainers.checkpoint.export --run RUN --output DIR --kind KIND [--checkpoint NAME]` exports again, with
`--gguf TYPES --llama_cpp DIR` also as GGUF files.
KIND is adapter, merged or full.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import GenerationConfig
from transformers.utils import cached_file

from trainers.checkpoint.export_check import (
    BASE,
    Expected,
    LoadedBack,
    Probe,
    greedy_text,
    held_dtype,
    load_back,
    sample,
    trainer_loss,
)
from trainers.checkpoint.gguf import check_gguf, write_gguf
from trainers.checkpoint.gguf_file import SUFFIX, gguf_section
from trainers.checkpoint.loading_code import loading_code
from trainers.checkpoint.scratch import Scratch, map_weights
from trainers.checkpoint.weights import load_weights, refuse_other_base, saved_factors
from trainers.config.fields import sections
from trainers.config.gguf_types import GgufRequest, gguf_request
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.parse import Request
from trainers.data.formats import RowError
from trainers.data.padding import padding_token
from trainers.data.prepare import load_tokenizer
from trainers.data.template import Encoder
from trainers.model.config_checks import auto_class
from trainers.model.load import (
    build_unread,
    load_model_config,
    model_path,
    read_model_config,
    stored_dtype,
    weight_files,
)
from trainers.model.lora import add_adapters, token_adapters
from trainers.model.principal import first_adapter, leave_residual, save_as_plain
from trainers.model.quantization import dequantise
from trainers.objectives.loss_module import inner_model
from trainers.objectives.output_head import scalar_head
from trainers.run.compatibility import FREE, plain, saved_config
from trainers.run.errors import TrainingError
from trainers.run.folder import RunFolder, export_name, read_json, write_json
from trainers.run.lineage import EXPORT_RECORD, export_record
from trainers.run.manifest import read_manifest, sha256, sync, verify
from trainers.run.model_card import History, card_title, history_of, hub_id, model_card
from trainers.run.record import RunRecord
from trainers.run.unfinished import being_written, new_beside

SHARD_SIZE = "5GB"
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_SLOWEST = 5e6
"""Lowest rate of an export in bytes of weights per second: a slow network disk, read and written a few times."""


def export_kind(config: TrainConfig) -> str:
    """What a run exports: `full`, `adapter` or `merged`."""
    return "full" if config.method == "full" else "merged" if config.merge_adapter else "adapter"


def export_seconds(folder: Path, config: TrainConfig) -> float:
    """Maximum seconds for the export of a checkpoint, by the size of the model, which is also loaded back."""
    files = [*folder.glob("*.safetensors"), *weight_files(config)]
    return sum(path.stat().st_size for path in files) / _SLOWEST


def export_checkpoint(
    folder: Path, config: TrainConfig, target: Path, kind: str, results: dict[str, Any], record: RunRecord | None,
    averaged: bool = False, again: Mapping[str, Any] | None = None, gguf: GgufRequest | None = None,
) -> LoadedBack:  # fmt: skip
    """Exports the weights of a checkpoint that any strategy may have written. Every export goes through here.

    Options that make the model are those of the checkpoint: a later attempt may have changed them with --force. Those
    that may change freely, such as where its base is, are the run's; the model card has the checkpoint's.

    The model is rebuilt on the CPU of one process, so that no wrapper of a strategy affects its names or tensors. Its
    weights stay in their files, where the memory for them is not needed; those that change do so in files of their own.

    Args:
        folder: the checkpoint.
        config: the config of the run's newest attempt.
        target, kind, results, record: see `export`.
        averaged: whether to export the moving average of the weights.
        again: how to repeat what the run does not export by itself: parts of `History`.
        gguf: GGUF files to write beside it.

    Raises:
        TrainingError: if the export, loaded back, is not the model that was trained.
        ConfigError: if llama.cpp cannot write those files of this model.
    """
    manifest = read_manifest(folder)
    history = replace(history_of(RunFolder(folder.parent.parent), manifest, averaged), **(again or {}))
    described, config = saved_config(config, manifest), saved_config(config, manifest, FREE)
    build = partial(_trained, folder, config, averaged)
    return export(build, config, target, kind, results, record, history, described, gguf)


def _trained(folder: Path, config: TrainConfig, averaged: bool, scratch: Scratch) -> nn.Module:
    """The model of a checkpoint, with its weights mapped from their files unless they can only be loaded whole."""
    model, stored = build_unread(config)
    refuse_other_base(read_manifest(folder), model, stored)
    load_weights(folder, model, stored, averaged)
    if config.method != "full" and config.init_lora_weights == "pissa":
        leave_residual(model, stored, saved_factors(folder))
    map_weights(model, stored, scratch)
    return model


def export(
    build: Callable[[Scratch], Any],
    config: TrainConfig,
    target: Path,
    kind: str,
    results: dict[str, Any],
    record: RunRecord | None = None,
    history: History | None = None,
    described: TrainConfig | None = None,
    gguf: GgufRequest | None = None,
) -> LoadedBack:
    """Writes a model folder atomically, and checks it by loading it back.

    Args:
        build: makes the unwrapped model with the trained weights, of which it keeps no reference.
        config: the config that the model is built by.
        target: the folder to publish.
        kind: `adapter`, `merged` or `full`.
        results: last metrics, for the model card.
        record: record of the run if the target is in its folder, so that an earlier export is replaced; None if the
            target is elsewhere, where it must be new or empty.
        history: how the weights came to be, for the model card; None if unknown.
        described: the config for the model card and the record; None for `config`.
        gguf: GGUF files to write beside it, which are published with it.

    Raises:
        ConfigError: if the target contains files that the run did not write, or llama.cpp does not know the model.
        TrainingError: if the loss of the export differs from the trainer's; its folder is then `<target>-failed`.
    """
    temporary = record.temporary(target.name) if record is not None else new_beside(target)
    with being_written(temporary):
        tokenizer, dtype = load_tokenizer(config), _export_dtype(config, kind)
        history = _with_revision(history or History(), config)
        its_config = described or config
        code = loading_code(its_config, kind, auto_class(config, read_model_config(config)))
        card = partial(model_card, its_config, kind, results, code, history)
        if gguf is not None:
            check_gguf(gguf, config, tokenizer, dtype, temporary)
        probes = sample(config, tokenizer, card())
        expected = _write_model(build, config, temporary, kind, probes, tokenizer, dtype)
        checked = load_back(temporary, config, kind, probes, expected, dtype)
        if gguf is not None and not checked.failed:
            title, loss = card_title(its_config, history), expected.loss + expected.rounding
            files = write_gguf(temporary, gguf, config, tokenizer, dtype, title, probes, loss)
            checked = replace(checked, gguf=tuple(files))
        large = [path for suffix in (".safetensors", SUFFIX) for path in temporary.glob(f"*{suffix}")]
        weights = {path.name: (path.stat().st_size, sha256(path)) for path in large}
        text = card(str(checked), weights, gguf_section(checked.gguf))
        (temporary / "README.md").write_text(text, encoding="utf-8")
        names = [str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file()]
        stated = export_record(
            _recorded(its_config, history), history.stages, weights, [*names, EXPORT_RECORD], checked.verdict,
            history.base, history.merge.as_json() if history.merge else None,
        )  # fmt: skip
        stated |= {"gguf": [file.as_json() for file in checked.gguf]} if checked.gguf else {}
        write_json(temporary / EXPORT_RECORD, stated)
        for path in [*temporary.rglob("*"), temporary]:
            sync(path)
        print(checked, *checked.gguf, sep="\n", flush=True)
        final = _failed(target, record) if checked.failed else target
        if record is not None:
            record.publish(temporary, final.name)
        else:
            os.replace(temporary, final)
    if checked.failed and history.merge is not None:
        remedy = "" if dtype == torch.float32 else "; try --dtype float32"
        raise TrainingError(f"{checked}; it is not the merged model{remedy}")
    if checked.failed:
        raise TrainingError(
            f"{checked}; it is not the trained model, and was left in {final.name}; the checkpoint is kept, so "
            "retry with `tunesmith export`" + ("" if dtype == torch.float32 else ", for instance --dtype float32")
        )
    return checked


def _with_revision(history: History, config: TrainConfig) -> History:
    """The history with the commit of a base model on the Hub, which names the folder of its files in the cache."""
    if (name := hub_id(config.model_name_or_path)) is None:
        return history
    cached = try_to_load_from_cache(name, "config.json", revision=config.model_revision)
    return replace(history, revision=Path(cached).parent.name if isinstance(cached, str) else "")


def _recorded(config: TrainConfig, history: History) -> dict[str, Any]:
    """The options for the record: all of them, or those that say what the model is if it was merged, not trained."""
    options, every = plain(config), sections()
    if history.merge is None:
        return options
    kept_options = {*every["model"], *every["method"], "objective", "mixed_precision", "template_date"}
    return {name: value for name, value in options.items() if name in kept_options}


def _failed(target: Path, record: RunRecord | None) -> Path:
    """The folder of an export that failed its check."""
    aside = target.with_name(f"{target.name}-failed")
    return aside if record is not None or not aside.exists() else Path(f"{aside}-{secrets.token_hex(4)}")


def _write_model(
    build: Callable[[Scratch], Any],
    config: TrainConfig,
    folder: Path,
    kind: str,
    probes: list[Probe],
    tokenizer: Any,
    dtype: torch.dtype,
) -> Expected:
    """Writes the model folder; returns what the model computed before merging.

    Its model is freed before the export is loaded back: both might not fit in memory.
    """
    scratch = Scratch(folder.parent)  # on NFS, a deleted file keeps a name in its folder while it is mapped
    model = build(scratch)
    scratch.reserved = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
    if kind == "merged":
        # Merge in fp32 and round once afterwards: merging into a bf16 base would round a small adapter away.
        model = _unquantised(model, config) if config.method == "qlora" else model
        scratch.copy_weights(model, torch.float32)  # also those in fp32: merged in place, their pages would be memory
        model = model.float()  # its buffers
    compute = held_dtype(config, kind)
    expected = exact = trainer_loss(model, probes, compute)
    text = greedy_text(model, probes, compute)
    if kind == "merged":
        _untie(inner_model(model), scratch)
        model = model.merge_and_unload()
        exact = trainer_loss(model, probes, compute)
    only_trained, rounding = kind == "adapter", 0.0
    if dtype != torch.float32:
        _cast(model, dtype, only_trained, scratch, back=True)
        rounding = trainer_loss(model, probes, compute) - exact
    _cast(model, dtype, only_trained, scratch)
    _write(model, tokenizer, folder)
    if kind != "adapter" and hasattr(inner_model(model).config, "vision_config"):
        _copy_processor(config, folder)
    if kind == "adapter" and config.init_lora_weights == "pissa":
        save_as_plain(folder, first_adapter(model))
    if kind == "adapter" and config.rope_scaling != "none":
        load_model_config(config).save_pretrained(folder / BASE)
    return Expected(expected, rounding, text)


def _copy_processor(config: TrainConfig, folder: Path) -> None:
    """Copies how the base model prepares images, which training on text leaves as it is."""
    for name in _PROCESSOR_FILES:
        source = cached_file(
            model_path(config), name, revision=config.model_revision, _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=False, _raise_exceptions_for_connection_errors=False,
        )  # fmt: skip
        if source is not None:
            shutil.copyfile(source, folder / name)


def _untie(base: Any, scratch: Scratch) -> None:
    """Gives an output head tied to the embedding a weight of its own if an adapter changes one of them only."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # takes long, and every rank imports this module

    layers = [base.get_output_embeddings(), base.get_input_embeddings()]
    head, embedding = (layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer for layer in layers)
    if head is None or head.weight is not embedding.weight or layers == [head, embedding]:
        return
    head.weight = nn.Parameter(scratch.copy(head.weight, head.weight.dtype), requires_grad=False)
    for model_config in (base.config, base.config.get_text_config()):
        model_config.tie_word_embeddings = False


def _export_dtype(config: TrainConfig, kind: str) -> torch.dtype:
    if kind == "adapter" and config.init_lora_weights == "pissa":
        return torch.float32  # a small difference of two products, which rounding would lose
    return stored_dtype(config) if config.export_dtype == "auto" else getattr(torch, config.export_dtype)


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes weights, tokenizer and generation config (or padding) with transformers and peft."""
    base = inner_model(model)
    base.config.use_cache = True
    if scalar_head(base) is None:
        base.generation_config = base.generation_config or GenerationConfig()
        ends = stop_tokens(tokenizer, base.generation_config)
        base.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
        base.generation_config.save_pretrained(folder)
    else:  # the stock forward pass scores the last token that is no padding
        base.config.get_text_config().pad_token_id = base.config.pad_token_id = padding_token(tokenizer)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(base.config.pad_token_id)
    more = {"save_embedding_layers": False} if token_adapters(model) else {}  # the rows of new tokens are enough
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE, safe_serialization=True, **more)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def _cast(model: nn.Module, dtype: torch.dtype, only_trained: bool, scratch: Scratch, back: bool = False) -> None:
    """Casts the weights to export, one by one; weights that transformers always loads in fp32 are kept in fp32.

    Args:
        model: the model.
        dtype: the dtype to cast to.
        only_trained: leave frozen weights as they are.
        scratch: where the results go.
        back: cast back to the former dtype, so that the weights are only rounded.
    """
    base = inner_model(model)
    fp32 = set(getattr(base, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        fp32 |= set(getattr(base, "_keep_in_fp32_modules", None) or ())
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and (weight.requires_grad or not only_trained):
            after = torch.float32 if fp32 & set(name.split(".")) else dtype
            if after != weight.dtype:
                weight.data = scratch.copy(weight.data.to(after), weight.dtype if back else after)


def stop_tokens(tokenizer: Any, generation_config: GenerationConfig) -> list[int]:
    """Ids that end a reply: the base model's own, the tokenizer's eos, and the end-of-turn token of the chat template.

    Without the last, a chat model would go on to write the user's next turn.
    """
    own = generation_config.eos_token_id
    ids = [*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id, _turn_end(tokenizer)]
    return sorted({token for token in ids if isinstance(token, int)})


def _turn_end(tokenizer: Any) -> int | None:
    """The token right after a reply in the chat template; None if there is no template or no such token."""
    if not tokenizer.chat_template:
        return None
    question, reply = "Is it one?", "It is one."
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    try:
        text = Encoder.of(tokenizer, assistant_only=False).render(messages)
    except (ConfigError, RowError):
        return None
    after = text.rpartition(reply)[2].lstrip()
    tokens = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    ends = [token for token in tokens if token.strip() and after.startswith(token)]
    return tokens[max(ends, key=len)] if ends else None


def _unquantised(model: Any, config: TrainConfig) -> nn.Module:
    """The same adapters on the dequantised base; merging into 4-bit weights, as peft does, would round them away."""
    trained = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
    plain = add_adapters(dequantise(model.unload()), config)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            if weight.requires_grad:
                weight.copy_(trained.pop(name))
    assert not trained, f"adapter weights missing in the dequantized model: {sorted(trained)}"
    return plain


def main(argv: list[str]) -> int:
    """Exports the weights of a run's checkpoint; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainers.checkpoint.export", description="Export a run's weights.")
    parser.add_argument("--run", required=True, help="run folder")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--kind", required=True, choices=("adapter", "merged", "full"))
    parser.add_argument("--checkpoint", help="name of one of the run's checkpoints; default: the newest")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="default: the run's option")
    parser.add_argument("--ema", action="store_true", help="the moving average of the weights")
    parser.add_argument("--replace", action="store_true", help="replace what the run exported to its own folder before")
    parser.add_argument("--gguf", help="types of GGUF files to write too, such as f16,q4_k_m")
    parser.add_argument("--llama_cpp", type=Path, help="folder of the source of llama.cpp")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *signalled: sys.exit(128 + signal.SIGTERM))  # removes what is unfinished
    run, output = RunFolder(arguments.run), Path(arguments.output)
    try:
        gguf = gguf_request(arguments.gguf, arguments.llama_cpp)
        export_again(
            run, output, arguments.kind, arguments.checkpoint, arguments.dtype, arguments.ema, gguf, arguments.replace
        )  # fmt: skip
    except ConfigError as error:
        print("\n".join(error.lines), file=sys.stderr)
        print(json.dumps({"mistakes": error.as_json()}), flush=True)
        return 2
    except TrainingError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def export_again(
    run: RunFolder, target: Path, kind: str, checkpoint: str | None, dtype: str | None = None, averaged: bool = False,
    gguf: GgufRequest | None = None, replaces: bool = False,
) -> None:  # fmt: skip
    """Exports the weights of a checkpoint of a run.

    Args:
        run: the run.
        target: the folder to write.
        kind: `adapter`, `merged` or `full`.
        checkpoint: its name; None for the one that the run itself would export.
        dtype: dtype of the weights; None for the run's `export_dtype`.
        averaged: export the moving average of the weights.
        gguf: GGUF files to write beside it.
        replaces: replace what the run exported to its own folder before.

    Raises:
        TrainingError: if the export is not the model that was trained.
        ConfigError: if the run or the checkpoint is missing or bad, the kind does not fit the method, or another
            process exports the run to its own folder.
    """
    config = Request(config=str(run.config)).resolve()
    config = config.model_copy(update={"export_dtype": dtype}) if dtype else config
    fitting = ("full",) if config.method == "full" else ("adapter", "merged")
    if kind not in fitting:
        raise ConfigError(f"--kind {kind} does not match method={config.method}; use {' or '.join(fitting)}")
    names = sorted(path.name for path in run.checkpoints.glob("step-" + "[0-9]" * 8))
    if not names:
        raise ConfigError(f"run {run.id} has no checkpoint; it saves one every save_steps, and when it is stopped")
    if checkpoint and checkpoint not in names:
        raise ConfigError(f"checkpoint {checkpoint} does not exist; run {run.id} has: {', '.join(names)}")
    is_own = target.absolute() == run.path / export_name(kind, averaged) and run.record.exists()
    with run.record.exported_alone() if is_own else nullcontext():
        if replaces and is_own:
            run.record.refuse_foreign(target.name)
        elif target.exists() and (not target.is_dir() or any(target.iterdir())):
            remedy = "use --replace, or a new folder" if is_own else "use a new folder, so that nothing is overwritten"
            raise ConfigError(f"--output {target} is not empty; {remedy}")
        folder = run.checkpoints / (checkpoint or _chosen(run, names, config))
        try:
            manifest = verify(folder)
            record = run.record if is_own else None
            results = {"step": manifest["step"], **({"weights": f"ema_decay={config.ema_decay}"} if averaged else {})}
            is_result = folder.name == _chosen(run, names, config) and kind == export_kind(config) and not averaged
            is_same = is_result and dtype is None and gguf is None
            again = {} if is_same else _repeated(run, manifest["step"], kind, dtype, averaged, gguf)
            checked = export_checkpoint(folder, config, target, kind, results, record, averaged, again, gguf)
        except ConfigError:
            raise
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"checkpoint {folder.name} cannot be exported: {error}; name another --checkpoint"
            ) from None
    facts: dict[str, Any] = {"dtype": checked.dtype, "loss_difference": checked.difference, "check": str(checked)}
    facts |= {"gguf": [{**file.as_json(), "text": str(file)} for file in checked.gguf]}
    print(json.dumps({"export_dir": str(target.absolute()), "kind": kind, "step": manifest["step"], **facts}))


def _repeated(
    run: RunFolder, step: int, kind: str, dtype: str | None, averaged: bool, gguf: GgufRequest | None
) -> dict[str, Any]:
    """The parts of `History` that say how to repeat an export that a run does not write by itself."""
    total = (run.read_state() or {}).get("total_steps")
    line = ["--checkpoint", f"step-{step:08d}", *(["--merged"] if kind == "merged" else [])]
    line += ["--ema"] if averaged else []
    line += ["--dtype", dtype] if dtype else []
    line += ["--gguf", ",".join(gguf.types), "--llama_cpp", "llama.cpp"] if gguf else []
    return {"stop_at_step": step if isinstance(total, int) and step < total else None, "export": line}


def _chosen(run: RunFolder, names: list[str], config: TrainConfig) -> str:
    """The checkpoint that the run itself exports: the best under `load_best_model_at_end`, otherwise the newest."""
    newest = read_json(run.checkpoints / names[-1] / "manifest.json") or {}
    best = (newest.get("progress") or {}).get("best_step") if config.load_best_model_at_end else None
    name = f"step-{best:08d}" if best is not None else names[-1]
    return name if name in names else names[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
