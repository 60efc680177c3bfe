"""Checks a model without reading its weights: from its config, an empty copy of it, and the headers of its files."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from trainers.checkpoint.weights import saved_tensors
from trainers.config.mistakes import ConfigError, errors_about
from trainers.config.options import TrainConfig
from trainers.config.teacher import about_frozen, teacher_config
from trainers.data.prepare import load_tokenizer
from trainers.data.tokenizer import new_token_ids
from trainers.model.config_checks import own_code
from trainers.model.fp8 import convert
from trainers.model.freezing import freeze
from trainers.model.load import (
    base_dtype,
    check_attention,
    compiled_blocks,
    compute_dtype,
    load_mistake,
    load_model_config,
    model_path,
)
from trainers.model.lora import add_adapters
from trainers.model.probe import in_one_line
from trainers.model.qat import prepare
from trainers.model.quantization import refuse_quantised
from trainers.model.reachability import freeze_unreached, reach_of, refuse_unreached
from trainers.model.rope_scaling import refuse_unscaled, scaled_positions
from trainers.model.scalar_head import check_head, model_family
from trainers.model.vocabulary import grow_vocabulary, grown_size
from trainers.model.weight_names import fit_lines, misfits
from trainers.objectives.loss_module import LossModule
from trainers.parallel.experts import planned
from trainers.parallel.fsdp import refuse_wrap
from trainers.parallel.pipeline_split import refuse_tied_shards, split_layers
from trainers.parallel.sequence import refuse_unsplittable_rows
from trainers.parallel.tensor import split_model
from trainers.run.disk import is_expert
from trainers.run.weight_headers import Headers
from trainers.strategy.expert_plan import expert_refusals
from trainers.strategy.strategy import Strategy
from trainers.strategy.tensor_plan import refusals

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
           "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
           "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}  # fmt: skip


_SPECIAL = ("lora_rank_pattern", "lora_alpha_pattern", "lora_target_parameters", "modules_to_save", "use_dora",
            "init_lora_weights", "new_tokens")  # fmt: skip
"""Options of adapters that a model may contradict, or that change how many weights they have."""


def inspect_model(config: TrainConfig, headers: Headers | None, strategy: Strategy) -> dict[str, Any]:
    """Checks whether a model can be trained; only reads its config and tokenizer.

    Args:
        config: The training config.
        headers: Headers of all weight files; None if unavailable or not needed.
        strategy: The strategy, resolved for all processes.

    Returns:
        `lines` for the user, `vocab_size`, `positions` that the model supports with `rope_scaling`, and
        for some models `trained_weights`, their number.

    Raises:
        ConfigError: If the config describes no causal language model that can be built and trained here, the weights in
            the files do not fit it, or the strategy cannot split it.
    """
    model_config = load_model_config(config)
    if not config.random_init:
        _check_generation(config)
        refuse_quantised(config, model_config, {name: dtype for name, (dtype, _) in (headers or {}).items()})
    load_tokenizer(config)  # the export needs it, even where the data is cached
    text = model_config.get_text_config()
    tokens = new_token_ids(config).values()
    facts: dict[str, Any] = {"vocab_size": grown_size(text.vocab_size, tokens, config.pad_vocab_to_multiple_of)}
    facts["positions"] = scaled_positions(config, text)
    _refuse_sizes(model_config, strategy)
    if own_code(config, model_config):
        return {"lines": [], **facts}
    model, reach = check_empty(config, copy.deepcopy(model_config)), reach_of(config, model_config)
    lines = grow_vocabulary(config, model)
    freeze_unreached(model, reach)
    splits = strategy.splits_model
    # Adding adapters reveals names that match no module, and counts the adapters on experts.
    special = config.lora_target_modules != ["all-linear"] or any(
        getattr(config, name) != TrainConfig.model_fields[name].default for name in _SPECIAL
    )
    if config.method != "full" and (splits or special or any(map(is_expert, headers or {}))):
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = add_adapters(model, config)
        facts["trained_weights"] = _trained(model)
    if config.method == "full" and (freeze(config, model) or lines):
        facts["trained_weights"] = _trained(model)
    check_attention(config, model_config)
    refuse_unreached(config, model_config.model_type, reach.unreached)
    if config.mixed_precision == "fp8":
        convert(model)
    if config.qat != "none":
        prepare(config, model)
    if splits or config.torch_compile:
        refuse_split(config, model, strategy)
    if headers is None:
        return {"lines": lines, **facts}
    try:
        report = _loading_report(config, model_config, headers)
    except Exception as error:
        if getattr(model_config, "quantization_config", None) is None:
            raise ConfigError(load_mistake(config, error)) from None
        problem = f": transformers cannot dequantize its weights ({in_one_line(error)})"
        remedy = "use an unquantized copy of the model"
        raise ConfigError.about("model_name_or_path", config.model_name_or_path, problem, remedy) from None
    return {"lines": [*lines, *fit_lines(config, report, model_config)], **facts}


def _trained(model: Any) -> int:
    """Number of weights that are trained."""
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def _refuse_sizes(model_config: Any, strategy: Strategy) -> None:
    """Raises `ConfigError` if the model config shows that rows, matrices or experts cannot be split over the mesh."""
    text, sizes = model_config.get_text_config(), strategy.sizes
    refuse_unsplittable_rows(text, sizes)
    if mistakes := refusals(text, sizes.tp) + expert_refusals(text, sizes.ep):
        raise ConfigError(mistakes)


def refuse_split(config: TrainConfig, model: Any, strategy: Strategy) -> None:
    """Checks that a strategy can split a model over its ranks, and that its blocks can be compiled.

    Calls the same functions, in the same order, as each rank does in `trainers.build.backend`.

    Args:
        config: The training config.
        model: The model with its adapters, on the meta device; modified in place.
        strategy: The strategy, resolved for all processes.

    Raises:
        ConfigError: If it cannot.
    """
    loss, sizes = LossModule(model, compute_dtype(config)), strategy.sizes
    split_model(loss, None, 0, sizes.tp, first=True)
    if sizes.ep > 1:
        planned(loss, sizes.ep)
    if config.torch_compile:
        compiled_blocks(loss.base)
    if sizes.pp > 1:
        if sizes.dp_shard > 1:
            refuse_tied_shards(loss, strategy.pp_schedule)
        split_layers(loss, strategy.pp_schedule, sizes.pp)
    elif strategy.distributed_type == "FSDP":
        refuse_wrap(loss, strategy.fsdp)


def refuse_teacher_split(config: TrainConfig, strategy: Strategy) -> None:
    """Checks that a strategy can split the teacher of a config over its ranks; reads only the configs of both models.

    Raises:
        ConfigError: If it cannot, naming the teacher.
    """
    teacher = teacher_config(config)
    with errors_about("model_name_or_path", "teacher"):
        model_config = load_model_config(teacher)
        model = check_empty(teacher, model_config)
    with about_frozen(config):
        _refuse_sizes(model_config, strategy)
        like = load_model_config(config).get_text_config().vocab_size
        split_model(LossModule(model, compute_dtype(config)), None, 0, strategy.sizes.tp, first=True, like=like)


def checkpoint_misfits(config: TrainConfig, manifest: dict[str, Any]) -> list[str]:
    """Returns how the weights listed in a checkpoint's manifest differ from those of the model; empty if they match.

    Raises:
        ConfigError: If the model cannot be built.
    """
    model_config = load_model_config(config)
    if own_code(config, model_config):
        return []
    model = check_empty(config, copy.deepcopy(model_config))
    grow_vocabulary(config, model)
    freeze_unreached(model, reach_of(config, model_config))
    if config.method != "full":
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = add_adapters(model, config)
    expected = {name: list(tensor.shape) for name, tensor in saved_tensors(model).items()}
    shapes = {name.removeprefix("model."): entry["shape"] for name, entry in manifest["tensors"].items()
              if name.startswith("model.")}  # fmt: skip
    return misfits(expected, shapes)


def _check_generation(config: TrainConfig) -> None:
    """Refuses a generation config with which transformers cannot load the model."""
    try:
        GenerationConfig.from_pretrained(model_path(config), revision=config.model_revision)
    except Exception as error:  # each option is validated differently
        if isinstance(error, OSError) and "JSON" not in str(error):  # it has none
            return
        raise ConfigError.about(
            "model_name_or_path",
            config.model_name_or_path,
            f": its generation_config.json is refused by transformers ({in_one_line(error)})",
            "correct or remove it",
        ) from None


def check_empty(config: TrainConfig, model_config: Any) -> Any:
    """Builds the model on the meta device, without memory for its weights.

    Raises:
        ConfigError: If its config is inconsistent, a package is missing, or it does not follow `rope_scaling`.
    """
    try:
        with torch.device("meta"):
            model = model_family(config).from_config(model_config, dtype=base_dtype(config))
    except ImportError as error:
        raise ConfigError.about(
            "model_name_or_path", config.model_name_or_path, f"needs a package that is missing: {in_one_line(error)}"
        ) from None
    except Exception as error:  # model families raise errors of any type
        raise ConfigError.about(
            "model_name_or_path",
            config.model_name_or_path,
            f": its config.json describes no model that can be built ({in_one_line(error)})",
            "correct it, or download the model again",
        ) from None
    check_head(config, model)
    refuse_unscaled(config, model)
    return model


def _loading_report(config: TrainConfig, model_config: Any, headers: Headers) -> dict[str, Any]:
    """Returns transformers' loading report for meta tensors with the names and shapes in the files.

    Loading them takes into account everything that transformers renames, fuses or splits.
    """
    tensors = {
        name: torch.empty(shape, dtype=_DTYPES.get(dtype, torch.float32), device="meta")
        for name, (dtype, shape) in headers.items()
    }
    family: Any = model_family(config)._model_mapping[type(model_config)]
    if family.config_class is model_config.sub_configs.get("text_config"):  # what transformers builds of it
        model_config = model_config.get_text_config()
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        _, report = family.from_pretrained(
            None, config=model_config, state_dict=tensors, device_map={"": "meta"}, ignore_mismatched_sizes=True,
            output_loading_info=True,
        )  # fmt: skip
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
    return report
