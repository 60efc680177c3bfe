"""Adds LoRA adapters, as peft makes them, to a base model."""

from __future__ import annotations

import logging
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedModel

from trainers.config.fields import text_of
from trainers.config.mistakes import ConfigError
from trainers.config.model_options import matching_patterns
from trainers.config.options import TrainConfig
from trainers.model.experts import router_names
from trainers.model.reachability import reach_noted, text_parts
from trainers.objectives.output_head import scalar_head, with_weights


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

    # Leave out modules that text does not reach; with "all-linear", also routers and layers adapters do not fit.
    targets = config.lora_target_modules
    spoken = {id(module) for part in text_parts(base) for module in part.modules()}
    spared = [name for name, part in base.named_modules() if _adaptable(part) and id(part) not in spoken]
    spared += {name.rpartition(".")[0] for name in reach_noted(base).unreached}
    everything = targets == ["all-linear"]
    if everything:
        spared += router_names(base) + _unadapted(base)
    adapters = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        rank_pattern=dict(config.lora_rank_pattern),
        alpha_pattern=dict(config.lora_alpha_pattern),
        lora_dropout=config.lora_dropout,
        target_modules=_without_routers(base) if everything else targets,
        exclude_modules=spared or None,
        use_rslora=config.use_rslora,
        task_type="SEQ_CLS" if config.objective_spec.scalar_head else "CAUSAL_LM",  # the former trains its head in full
        revision=config.model_revision,
    )
    set_seed(config.seed)
    left_out = {*spared, *_unadapted(base)}
    free = [name for name, part in base.named_modules() if _adaptable(part) and name not in left_out]
    names = sorted({name.rpartition(".")[2] for name in free})
    try:
        model: Any = get_peft_model(base, adapters, autocast_adapter_dtype=True)
        got = list(model.targeted_module_names)
    except ValueError as error:
        logging.getLogger(__name__).debug("peft refused the targets", exc_info=error)
        got = []
    head: Any = scalar_head(base)
    if head is not None:
        # Frozen and unused; peft made the trained copy from it.
        head.original_module.to(base.get_input_embeddings().weight.dtype)
    missing = [name for name in targets if name != "all-linear" and not any(_ends(target, name) for target in got)]
    if (missing and complete) or not got:
        raise ConfigError.about(
            "lora_target_modules",
            ",".join(missing or targets),
            f"matches no module of {config.model_name_or_path}",
            f"use all-linear, or some of {', '.join(names)}",
        )
    _refuse_merging_tied(config, base, got)
    if complete:
        _refuse_unclear_patterns(config, [*got, *model.targeted_parameter_names])
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


def _without_routers(base: PreTrainedModel) -> str | list[str]:
    """`all-linear`, or what is left of it where peft would take it for stacked experts and their router as well."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    converted = LoraConfig(target_modules="all-linear")
    convert_peft_config_for_transformers(converted, base, None)
    return sorted(converted.target_modules or []) if converted.target_parameters else "all-linear"


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
