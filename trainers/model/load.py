"""Loads a base model, and decides the dtype of each weight.

Weights come from the pretrained files or from a seeded initialisation, and are equal on every rank.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import set_seed
from safetensors import SafetensorError
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
    find_adapter_config_file,
)

from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.embedded import BASE_DIR
from trainers.model.attention import KERNELS
from trainers.model.config_checks import check_rows, check_values, own_code, refuse_other_tasks
from trainers.model.embedding_rate import embedding_rate_lines, refuse_unknown_embeddings
from trainers.model.freezing import freeze
from trainers.model.lora import add_adapters, leave_derived
from trainers.model.mixers import split_mixers
from trainers.model.probe import in_one_line
from trainers.model.quantization import (
    finish,
    leave_quantised,
    loading_options,
    many_threads,
    refuse_quantised,
    settle_quantisation,
)
from trainers.model.randomness import drop_randomness, route_as_in_inference
from trainers.model.reachability import (
    freeze_unreached,
    reach_lines,
    reach_of,
    reach_of_loaded,
    refuse_unreached,
    without_log,
)
from trainers.model.rope_scaling import refuse_unscaled, scale_rope
from trainers.model.rotary import choose_by_document
from trainers.model.scalar_head import check_head, has_head, init_head, model_family
from trainers.model.small_model import choose_attention
from trainers.model.stored import LeftInFiles, Source, without_memory
from trainers.model.vocabulary import grow_vocabulary
from trainers.model.weight_names import fit_lines
from trainers.objectives.load_balancing import refuse_load_balancing
from trainers.objectives.output_head import decoder_of
from trainers.run.from_run import adapter_of
from trainers.run.hub_errors import hub_mistake
from trainers.run.json_file import load_json
from trainers.run.weight_headers import ADAPTER_AS_MODEL, read_header

_STORED = {"F64": torch.float32, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_COMPUTE = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}

LOADER = "transformers.modeling_utils"
"""The logger of a table of missing weights, which would name a new head; `fit_lines` checks all others."""


def model_path(config: TrainConfig) -> str:
    """The Hub id or folder of the base model, with the embedded one resolved."""
    return str(BASE_DIR) if config.model_name_or_path == EMBEDDED else config.model_name_or_path


def compute_dtype(config: TrainConfig) -> torch.dtype:
    """Dtype of matrix products."""
    return _COMPUTE[config.mixed_precision]


def base_dtype(config: TrainConfig) -> torch.dtype:
    """Dtype of the base's weights: fp32 if they are trained with `master_weights`, otherwise the compute dtype."""
    return torch.float32 if config.method == "full" and config.master_weights else compute_dtype(config)


def stored_dtype(config: TrainConfig) -> torch.dtype:
    """The most common dtype in the base model's files by their headers; without files, the dtype in its config."""
    if not config.random_init:
        counts = Counter[torch.dtype]()
        for name, count in element_counts(weight_files(config)).items():
            if name in _STORED:
                counts[_STORED[name]] += count
        if counts:
            return counts.most_common(1)[0][0]
    stated = getattr(load_model_config(config), "dtype", None)
    return stated if isinstance(stated, torch.dtype) and stated in _STORED.values() else torch.float32


def weight_files(config: TrainConfig) -> list[Path]:
    """The base model's safetensors files in the local cache or folder; nothing is downloaded."""
    path = model_path(config)
    options: dict[str, Any] = {"revision": config.model_revision, "local_files_only": True}
    options["_raise_exceptions_for_missing_entries"] = False
    if single := cached_file(path, SAFE_WEIGHTS_NAME, **options):
        return [Path(single)]
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **options)
    shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values() if index else []
    files = [cached_file(path, name, **options) for name in sorted(set(shards))]
    return [Path(file) for file in files if file is not None]


def element_counts(files: Iterable[Path]) -> Counter[str]:
    """Counts elements per dtype, such as `BF16`, in safetensors files; reads only their headers."""
    counts = Counter[str]()
    for dtype, shape in (tensor for file in files for tensor in read_header(file).values()):
        counts[dtype] += math.prod(shape)
    return counts


def _where(config: TrainConfig) -> dict[str, Any]:
    return {"revision": config.model_revision, "trust_remote_code": config.trust_remote_code}


def read_model_config(config: TrainConfig) -> Any:
    """The base model's transformers config as it is."""
    return AutoConfig.from_pretrained(model_path(config), **_where(config))


def load_model_config(config: TrainConfig, published: Mapping[str, Any] | None = None) -> Any:
    """Loads the base model's transformers config and adjusts it for training.

    Args:
        config: the run's config.
        published: contents of its config.json, if already known; the file is then not read.

    Raises:
        ConfigError: if the model is missing, gated, damaged or an adapter, or cannot be packed or quantised.
    """
    try:
        adapter = None if published else find_adapter_config_file(model_path(config), revision=config.model_revision)
        if published:
            model_config = AutoConfig.for_model(**published)
        else:
            model_config = None if adapter else read_model_config(config)
        check_values(model_config)
    except OSError as error:
        raise ConfigError(load_mistake(config, error)) from None
    except Exception as error:  # each family validates its sizes differently
        damaged = f": its config.json describes no model ({in_one_line(error)})", "correct it, or download it again"
        problem, remedy = (None if published else _unknown_type(config)) or damaged
        raise ConfigError.about("model_name_or_path", config.model_name_or_path, problem, remedy) from None
    if adapter:  # transformers would silently load the base that it names
        raise ConfigError.about("model_name_or_path", config.model_name_or_path, ADAPTER_AS_MODEL)
    refuse_other_tasks(config, model_config)
    _keep_layers(config, model_config)
    check_rows(config, model_config)
    if line := scale_rope(config, model_config):
        _say(line)
    refuse_load_balancing(config, model_config)
    settle_quantisation(config, model_config)
    for line in drop_randomness(model_config):
        _say(line)
    return model_config


def _unknown_type(config: TrainConfig) -> tuple[str, str] | None:
    """What is wrong and the way out, if this version of transformers does not know the type of the model."""
    file = cached_file(model_path(config), CONFIG_NAME, revision=config.model_revision)
    content = load_json(Path(file)) if file is not None else None
    if not isinstance(content, dict):
        return None
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind in CONFIG_MAPPING:
        return None
    if content.get("auto_map"):
        return "has its own code", "review it, then pass --trust_remote_code true, or use another model"
    problem = f": transformers {transformers.__version__} does not know its model type {kind[:80]!r}"
    return problem, "install a newer transformers if it is a new model; if not, correct its config.json"


def load_base(config: TrainConfig) -> PreTrainedModel:
    """Loads the base model on the CPU in `base_dtype` (quantised for qlora), with attention that keeps documents apart.

    Its vocabulary has the new tokens of the config.

    Raises:
        ConfigError: if the files are missing, gated or damaged, or the architecture cannot be packed or quantised.
    """
    base = _load_base(config, load_model_config(config))
    for line in grow_vocabulary(config, base):
        _say(line)
    return base


def _load_base(config: TrainConfig, model_config: Any, left: LeftInFiles | None = None) -> PreTrainedModel:
    """`load_base` for a model config; with `left`, the weights stay on the meta device, and it records their places."""
    where = _where(config)
    settings: dict[str, Any] = {
        "dtype": base_dtype(config),
        "attn_implementation": check_attention(config, model_config),
    }
    reach = reach_of(config, model_config)
    refuse_unreached(config, model_config.model_type, reach.unreached)
    if config.method == "qlora":
        settings |= loading_options(compute_dtype(config))
    family, head_stored = model_family(config), not config.random_init and has_head(model_config)
    if config.random_init:
        set_seed(config.seed)
        model = family.from_config(model_config, trust_remote_code=config.trust_remote_code, **settings)
        check_head(config, model)
    else:
        settings |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        as_stored = copy.copy(model_config)  # loading removes the quantization that it undoes
        try:
            # Safetensors only: other weight files are pickles, which run code when loaded.
            quiet = nullcontext() if head_stored or family is AutoModelForCausalLM else without_log(LOADER)
            with quiet, left.recording() if left else many_threads() if config.method == "qlora" else nullcontext():
                model, report = family.from_pretrained(
                    model_path(config), config=model_config, use_safetensors=True, **where, **settings
                )
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError, SafetensorError) as error:
            raise ConfigError(load_mistake(config, error)) from None
        refuse_quantised(config, as_stored, _dtypes(config))
        check_head(config, model)  # its head may have weights of other names, which files lack
        for line in fit_lines(config, report, model_config):
            _say(line)
    for line in init_head(config, model, head_stored):
        _say(line)
    if config.method == "qlora":
        finish(model)
    refuse_unscaled(config, model)
    choose_by_document(model)
    split_mixers(model)
    route_as_in_inference(model)
    model.config.use_cache = False
    if own_code(config, model_config):  # only here is it known whether it can be built without memory
        reach = reach_of_loaded(model)
        refuse_unreached(config, model_config.model_type, reach.unreached)
    freeze_unreached(model, reach)
    for line in reach_lines(config, reach):
        _say(line)
    return model


def _dtypes(config: TrainConfig) -> dict[str, str]:
    """Dtypes in the base model's files by name."""
    headers = [read_header(file) for file in weight_files(config)]
    return {name: dtype for file in headers for name, (dtype, _) in file.items()}


def check_attention(config: TrainConfig, model_config: Any) -> str:
    """The attention implementation to load the model with; raises ConfigError if neither ours nor its own fits."""
    if own_code(config, model_config):
        return KERNELS["sdpa"]
    try:
        attention = choose_attention(model_config, config.packing)
    except ConfigError as error:
        raise ConfigError([f"model_name_or_path={config.model_name_or_path}: {line}" for line in error.lines]) from None
    if attention in KERNELS.values() or config.attn_implementation == "auto":
        return attention
    raise ConfigError.about(
        "attn_implementation",
        config.attn_implementation,
        f": {model_config.model_type} models support only their own attention",
        "use auto",
    )


def load_mistake(config: TrainConfig, error: Exception) -> Mistake:
    """Describes why a model could not be loaded."""
    path, revision = model_path(config), config.model_revision
    if not Path(path).is_dir() and (mistake := hub_mistake(path, revision, error)):
        return mistake
    problem = f"cannot be loaded: {str(error).strip().partition(chr(10))[0][:300]}"
    return Mistake(
        "model_name_or_path", config.model_name_or_path, problem, "check its name and files, or download it again"
    )


def _keep_layers(config: TrainConfig, model_config: Any) -> None:
    """Truncates the model to its first `num_hidden_layers` layers, if the option is set."""
    wanted, text = config.num_hidden_layers, model_config.get_text_config()
    if wanted is None:
        return
    if wanted > text.num_hidden_layers:
        raise ConfigError.about(
            "num_hidden_layers", wanted, f": {config.model_name_or_path} has {text.num_hidden_layers}", "use fewer"
        )
    text.num_hidden_layers = wanted
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:wanted]


def _say(line: str) -> None:
    """Prints a line on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


def build_model(config: TrainConfig) -> nn.Module:
    """Builds the model to train: the base model, with adapters unless `method=full`.

    Raises:
        ConfigError: see `load_base`, `add_adapters` and `freeze`.
    """
    base = load_base(config)
    use_checkpointing(base, config)
    return _trainable(base, config)


def _trainable(base: PreTrainedModel, config: TrainConfig) -> nn.Module:
    """The base with adapters, or with the weights frozen that the config names."""
    refuse_unknown_embeddings(base, config)
    frozen = freeze(config, base) if config.method == "full" else []
    model = base if config.method == "full" else add_adapters(base, config)
    for line in [*frozen, *embedding_rate_lines(model, config)]:
        _say(line)
    return model


def build_unread(config: TrainConfig) -> tuple[nn.Module, dict[str, Source]]:
    """Builds the model of `build_model` with its base on the meta device, for a strategy to cut before it is read.

    Returns:
        The model, and where each weight on the meta device is to be read from, under all of its names if it is tied;
        none if the weights can only be loaded whole.

    Raises:
        ConfigError: see `build_model`.
    """
    model_config = load_model_config(config)
    if why := _whole_reason(config, model_config):
        _refuse_unknown_error(config, why)
        _say(f"every process loads the whole model: {why}")
        return build_model(config), {}
    left = LeftInFiles()
    base = _load_base(config, copy.deepcopy(model_config), left)
    if (sources := left.sources(base)) is None:
        _refuse_unknown_error(config, why := "it is unknown where some of its weights come from")
        _say(f"every process loads the whole model: {why}")
        del base
        return build_model(config), {}
    for line in grow_vocabulary(config, base, sources):
        _say(line)
    if config.method == "qlora":
        sources = leave_quantised(base, sources)
    use_checkpointing(base, config)
    with without_memory(base):
        model = _trainable(base, config)
    leave_derived(model, sources)
    weights = model.named_parameters(remove_duplicate=False)
    return model, {name: sources[id(weight)] for name, weight in weights if id(weight) in sources}


def _whole_reason(config: TrainConfig, model_config: Any) -> str | None:
    """Why the weights of a model cannot be read in parts; None if they can."""
    if config.random_init:
        return "random weights are drawn one after another"
    if getattr(model_config, "quantization_config", None):
        return "its weights are stored quantised"
    if config.method == "full" and adapter_of(config):
        return "an adapter is merged into it"
    return "its code is its own" if own_code(config, model_config) else None


def _refuse_unknown_error(config: TrainConfig, why: str) -> None:
    """Raises ConfigError if adapters are to begin with what quantization takes from weights that are loaded whole."""
    if config.method == "qlora" and config.init_lora_weights == "loftq":
        problem = f"compares the weights in the files with those in 4 bits, and the model is loaded whole: {why}"
        raise ConfigError.about("init_lora_weights", "loftq", problem, "use default")


def use_checkpointing(base: PreTrainedModel, config: TrainConfig) -> None:
    """Enables activation checkpointing, full or selective, if the config requests it."""
    if not config.gradient_checkpointing:
        return
    choices: dict[str, Any] = {"use_reentrant": False}
    if config.selective_checkpointing:
        choices["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=choices)


def _keep_products(context: Any, operation: Any, *inputs: Any, **kwargs: Any) -> CheckpointPolicy:
    """Selective checkpointing: saves matmul and attention outputs (expensive to recompute), recomputes the rest."""
    name = operation.name().partition(".")[0].rpartition("::")[2]
    dear = name in ("mm", "addmm", "bmm", "baddbmm", "linear", "_varlen_attn", "_scaled_mm") or "dot_product" in name
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(base: PreTrainedModel) -> None:
    """Compiles each decoder block in place; all blocks share one graph, and weights keep their names."""
    for block in compiled_blocks(base):
        block.compile()


def compiled_blocks(base: PreTrainedModel) -> nn.ModuleList:
    """The decoder blocks that `torch_compile` compiles.

    Raises:
        ConfigError: if the decoder has no list of layers.
    """
    decoder: Any = decoder_of(base)
    blocks: nn.ModuleList | None = getattr(decoder, "layers", None)
    if blocks is None:
        raise ConfigError.about(
            "torch_compile", True, f": {base.config.model_type} has no list of layers", "use torch_compile=false"
        )
    return blocks
