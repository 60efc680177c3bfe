"""Adds LoRA adapters, as peft makes them, to a base model."""

from __future__ import annotations

import copy
import logging
from typing import Any, NamedTuple

import torch
from accelerate.utils import set_seed
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedModel

from trainers.config.fields import text_of
from trainers.config.mistakes import ConfigError
from trainers.config.model_options import matching_patterns
from trainers.config.options import TrainConfig
from trainers.model.experts import router_names, target_stacks
from trainers.model.principal import refuse_without_vectors
from trainers.model.probe import in_one_line
from trainers.model.reachability import reach_noted, text_parts
from trainers.model.stored import NormsOf, Source, replace
from trainers.model.vocabulary import token_ids
from trainers.objectives.output_head import scalar_head, with_weights

KEY = "modules_to_save"
"""Name of peft's option, and of the attribute of a wrapper that holds the trained copies by adapter."""


def add_adapters(base: PreTrainedModel, config: TrainConfig, complete: bool = True) -> nn.Module:
    """Freezes the base and adds LoRA adapters in fp32, initialised equally on every rank by the seed.

    Args:
        base: the transformers model.
        config: the run's config.
        complete: False for a model of fewer layers, without some of the modules that the config names.

    Raises:
        ConfigError: if an option names modules that do not exist, or merging would change tied embeddings.
    """
    from peft import LoraConfig, get_peft_model
    from peft.utils.error import NoMatchingPeftModuleError

    # Leave out modules that text does not reach; with "all-linear", also routers and layers adapters do not fit.
    targets = config.lora_target_modules
    spoken = {id(module) for part in text_parts(base) for module in part.modules()}
    linear, reach = [(name, part) for name, part in base.named_modules() if _adaptable(part)], reach_noted(base)
    spared = [name for name, part in linear if id(part) not in spoken]
    spared += [*{name.rpartition(".")[0] for name in reach.unreached}, *reach.bypassed]
    everything = targets == ["all-linear"]
    if everything:
        spared += router_names(base) + _unadapted(base) + _saved(base, config)
    free = [name for name, _ in linear if name not in {*spared, *_unadapted(base)}]
    if complete:
        _refuse_unsaved(base, config)
    adapters = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        rank_pattern=dict(config.lora_rank_pattern),
        alpha_pattern=dict(config.lora_alpha_pattern),
        lora_dropout=config.lora_dropout,
        target_modules=_all_linear(base, free) if everything else targets or None,
        exclude_modules=spared or None,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        target_parameters=target_stacks(base, config, complete) or None,
        modules_to_save=[*config.modules_to_save] or None,
        trainable_token_indices=_token_rows(base, config) or None,
        task_type="SEQ_CLS" if config.objective_spec.scalar_head else "CAUSAL_LM",  # the former trains its head in full
        revision=config.model_revision,
    )
    frozen = base.get_input_embeddings().weight.dtype
    set_seed(config.seed)
    names = sorted({name.rpartition(".")[2] for name in free})
    try:
        model: Any = get_peft_model(base, adapters, autocast_adapter_dtype=True)
        got = list(model.targeted_module_names)
        adapted = [*got, *model.targeted_parameter_names]
    except ValueError as error:
        if config.use_dora and not isinstance(error, NoMatchingPeftModuleError):
            problem = f": peft cannot add it to {config.model_name_or_path} ({in_one_line(error)})"
            raise ConfigError.about("use_dora", True, problem, "leave it out") from None
        logging.getLogger(__name__).debug("peft refused the targets", exc_info=error)
        got, adapted = [], []
    if (head := scalar_head(base)) is not None:
        head.original_module.to(frozen)  # unused; peft made the trained copy from it
    for copied in copies(base):
        copied.trained.to(torch.float32)
    for adapter in token_adapters(base):
        adapter.trainable_tokens_delta.to(torch.float32)
    _refuse_parted_tokens(config, base)
    missing = [name for name in targets if name != "all-linear" and not any(_ends(target, name) for target in got)]
    if (missing and complete) or not adapted:
        raise ConfigError.about(
            "lora_target_modules",
            ",".join(missing or targets),
            f"matches no module of {config.model_name_or_path}",
            f"use all-linear, or some of {', '.join(names)}",
        )
    _refuse_merging_tied(config, base, got)
    refuse_without_vectors(config, model)
    if complete:
        _refuse_unclear_patterns(config, adapted)
    return model


def _refuse_unclear_patterns(config: TrainConfig, adapted: list[str]) -> None:
    """Raises ConfigError if a pattern for ranks or scalings matches no adapted module, or two match the same one.

    peft ignores the former, and takes the first of the latter.
    """
    for option in ("lora_rank_pattern", "lora_alpha_pattern"):
        patterns: dict[str, float] = getattr(config, option)
        matches = {module: matching_patterns(patterns, module) for module in adapted}
        matched = {pattern for several in matches.values() for pattern in several}
        if unmatched := [f"{pattern}={value:g}" for pattern, value in patterns.items() if pattern not in matched]:
            names = ", ".join(sorted({module.rpartition(".")[2] for module in adapted}))
            problem = "matches no module that has an adapter"
            raise ConfigError.about(option, ",".join(unmatched), problem, f"name some of {names}")
        for module, several in matches.items():
            if len(several) > 1:
                problem = f": {several[0]} and {several[1]} both match {module}"
                raise ConfigError.about(option, text_of(patterns), problem, "let each module match one at most")


class Copied(NamedTuple):
    """A module that an adapter replaces by a trained copy (peft's `modules_to_save`)."""

    original: nn.Module
    trained: nn.Module


def leave_derived(model: nn.Module, sources: dict[int, Source]) -> None:
    """Leaves in the files what adapters derive from weights that are there: copies of modules, and magnitudes of DoRA.

    Args:
        model: the peft model.
        sources: where weights on the meta device are to be read from, by id; those of adapters are added.
    """

    def leave(weight: nn.Parameter, source: Source) -> None:
        replace(weight, nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="meta")))
        sources[id(weight)] = source

    for original, trained in copies(model):
        for weight, copied in zip(original.parameters(), trained.parameters(), strict=True):
            if weight.is_meta:
                leave(copied, copy.copy(sources[id(weight)]))  # a checkpoint replaces that of the copy alone
    for adapter in token_adapters(model):  # a few rows, read at once
        weight = adapter.base_layer.weight
        for key, rows in adapter.trainable_tokens_delta.items() if weight.is_meta else ():
            width, read = slice(0, weight.shape[1]), torch.empty(rows.shape, dtype=weight.dtype)
            for row, token in zip(read, adapter.token_indices[key], strict=True):
                sources[id(weight)].read(row[None], (slice(token, token + 1), width))
            rows.data.copy_(read)
            adapter.trainable_tokens_original[key] = rows.detach().clone()
    for layer in model.modules():
        if vectors := getattr(layer, "lora_magnitude_vector", None):
            base: Any = layer.get_base_layer()  # type: ignore[operator]
            for vector in vectors.values() if base.weight.is_meta else ():
                dim = 0 if vector.fan_in_fan_out else 1
                leave(vector.weight, NormsOf(sources[id(base.weight)], base.weight.dtype, dim))


def token_adapters(model: nn.Module) -> list[Any]:
    """peft's layers that train some rows of an embedding or head; those that a tied layer shares are listed once."""
    layers: list[Any] = [part for part in model.modules() if isinstance(getattr(part, "token_indices", None), dict)]
    return [layer for layer in layers if layer.tied_adapter is None]


def _token_rows(base: Any, config: TrainConfig) -> dict[str, list[int]]:
    """peft's `trainable_token_indices`: the rows of the new tokens, in each layer that is not saved in full."""
    ids = token_ids(base)
    ends = [base.get_input_embeddings(), base.get_output_embeddings()] if ids else []
    by_name = {name: part for name, part in base.named_modules() if part in ends}
    for name in by_name:
        if any(_ends(name, target) for target in config.lora_target_modules):
            problem = "gets rows for new_tokens, which are trained without an adapter"
            raise ConfigError.about("lora_target_modules", name.rpartition(".")[2], problem, "leave it out")
    tied = len(ends) == 2 and ends[1] is not None and ends[0].weight is ends[1].weight
    trained = [name for name, part in by_name.items() if part is ends[0] or not tied]
    return {name: ids for name in trained if name not in _saved(base, config)}


def _refuse_parted_tokens(config: TrainConfig, base: Any) -> None:
    """Raises ConfigError if peft would train the new rows of one of two tied weights, or tie those of two.

    It goes by the model's config, which the weights need not follow.
    """
    ends = [getattr(end, "token_adapter", None) for end in (base.get_input_embeddings(), base.get_output_embeddings())]
    adapters = [end for end in ends if end is not None]
    if not adapters:
        return
    tied = len({id(adapter.base_layer.weight) for adapter in adapters}) < len(adapters)
    shared = any(adapter.tied_adapter is not None for adapter in adapters)
    head = base.get_output_embeddings()
    alone = len(adapters) == 1 and head is not None and getattr(head, "weight", None) is adapters[0].base_layer.weight
    if tied != shared or alone:
        problem = f": {base.config.model_type} ties its embedding and head in another way than its config says"
        raise ConfigError.about("new_tokens", ",".join(config.new_tokens), problem, "use method=full")


def copies(model: nn.Module) -> list[Copied]:
    """The modules of a model that are trained in full beside its adapters."""
    wrappers: list[Any] = [part for part in model.modules() if isinstance(getattr(part, KEY, None), nn.ModuleDict)]
    return [Copied(wrapper.original_module, wrapper.modules_to_save["default"]) for wrapper in wrappers]


def _saved(base: nn.Module, config: TrainConfig) -> list[str]:
    """Names of the modules that `modules_to_save` names."""
    names = [name for name, _ in base.named_modules(remove_duplicate=False)]
    return [name for name in names if any(_ends(name, target) for target in config.modules_to_save)]


def _refuse_unsaved(base: Any, config: TrainConfig) -> None:
    """Raises ConfigError unless `modules_to_save` names single layers that can be trained in full beside adapters."""
    parts = dict(base.named_modules(remove_duplicate=False))
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    for target in config.modules_to_save:
        names = [name for name in parts if _ends(name, target)]
        others = [name for name in parts if name.endswith(target) and name not in names]
        weights = [weight for name in names for weight in parts[name].parameters(recurse=False)]
        if not names:
            problem, remedy = f"matches no module of {config.model_name_or_path}", "use one such as embed_tokens"
        elif others:
            problem, remedy = f": peft compares ends of names, and would train {others[0]} as well", "write more of it"
        elif not weights or any(list(parts[name].children()) for name in names):
            problem, remedy = f": {names[0]} is no single layer with weights", "name the layers in it"
        elif not all(weight.requires_grad for weight in weights):
            problem, remedy = "gets no gradient from any text", "leave it out"
        elif tied and {parts[name] for name in names} & {head, embedding}:
            problem = ": embedding and output head are one weight, and a trained copy of one of them would part them"
            remedy = "use method=full, with freeze for the layers"
        elif any(_ends(name, adapted) for name in names for adapted in config.lora_target_modules):
            problem, remedy = "is in lora_target_modules too", "keep it in one of them"
        else:
            continue
        raise ConfigError.about("modules_to_save", target, problem, remedy)


def _all_linear(base: PreTrainedModel, free: list[str]) -> str | list[str]:
    """`all-linear`, or what is left of it where peft would take it for stacked experts and their router as well.

    Args:
        base: the transformers model.
        free: names of the linear layers that may have adapters. Without them, peft's names, which are ends, would fit
            other modules too: a layer `proj1.0` of an encoder gives `0`, which is also the first layer of the decoder.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    converted = LoraConfig(target_modules="all-linear")
    convert_peft_config_for_transformers(converted, base, None)
    if not converted.target_parameters:
        return "all-linear"
    return sorted(end for end in converted.target_modules or () if any(_ends(name, end) for name in free))


def _adaptable(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"  # GPT-2's linear layers


_MAMBA = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}


def _unadapted(base: Any) -> list[str]:
    """Names of linear layers that adapters do not fit, as they do not compute a plain linear product."""
    names = []
    for name, part in base.named_modules():
        mamba = base.config.model_type in _MAMBA and _ends(name, "out_proj")  # peft refuses these
        # Subclasses in transformers with their own forward, such as DeepSeek-V4's grouped product. Not bitsandbytes'
        # layers, which peft supports.
        own = type(part).__module__.startswith("transformers") and type(part).forward is not nn.Linear.forward
        if (mamba and _adaptable(part)) or (own and isinstance(part, nn.Linear) and not _multiplies(part)):
            names.append(name)
    return names


@torch.no_grad()
def _multiplies(layer: nn.Linear) -> bool:
    """Whether a layer computes a plain linear product in its own way, as Falcon's do; tried with small weights."""
    generator = torch.Generator().manual_seed(0)
    inputs, weight, bias = (torch.randn(size, generator=generator) for size in ((2, 6), (4, 6), (4,)))
    small: dict[str, torch.Tensor | None] = {"weight": weight, "bias": None if layer.bias is None else bias}
    try:
        with unset_fake_temporarily(), with_weights(layer, small):
            output = layer(inputs)
    except Exception:  # as other products do
        return False
    expected = nn.functional.linear(inputs, weight, small["bias"])
    return isinstance(output, torch.Tensor) and output.shape == expected.shape and torch.allclose(output, expected)


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _refuse_merging_tied(config: TrainConfig, base: Any, targeted: list[str]) -> None:
    """Raises ConfigError if merging an adapter into one of two tied matrices would change the other one too."""
    if config.merge_adapter and adapts_tied(base, targeted):
        raise ConfigError.about(
            "merge_adapter",
            True,
            "with an adapter on tied embeddings would change both of them",
            "leave lm_head and the embedding out of lora_target_modules, or export the adapter",
        )


def adapts_tied(base: Any, targeted: list[str]) -> bool:
    """Whether adapters are on an output head or embedding that have one weight in common."""
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return False
    tied = [name for name, part in base.named_modules() if part is head or part is embedding]
    return any(_ends(target, name.rpartition(".")[2]) for name in tied for target in targeted)
