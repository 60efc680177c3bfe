"""Mixture-of-experts models: router modules, and a report of where adapters were added."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.model.reachability import reach_noted, silent_weights
from trainers.strategy.expert_plan import EXPERT_COUNTS, largest_of

_CHOSEN_COUNTS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
_ROUTING = {"gate", "router", "shared_expert_gate"}


def has_experts(text_config: Any) -> bool:
    """Whether a model is a mixture of experts.

    Args:
        text_config: the transformers config of the language model.
    """
    return largest_of(text_config, EXPERT_COUNTS) > 1


def chosen_count(text_config: Any) -> int:
    """The number of experts that a token uses; 0 if unknown. `text_config` as for `has_experts`."""
    return largest_of(text_config, _CHOSEN_COUNTS)


def expert_share(text_config: Any) -> float:
    """The share of the experts that a token uses; 1 if it uses all, or there are none.

    Args:
        text_config: as for `has_experts`.
    """
    chosen, every = chosen_count(text_config), largest_of(text_config, EXPERT_COUNTS)
    return chosen / every if 0 < chosen < every else 1.0


def router_names(base: Any) -> list[str]:
    """Full names of the modules that choose or weigh experts; adapters on them would reroute tokens."""
    if not has_experts(base.config.get_text_config()):
        return []
    return [name for name, _ in base.named_modules() if _ROUTING & set(name.split("."))]


def target_stacks(base: nn.Module, config: TrainConfig, complete: bool) -> list[str]:
    """peft's `target_parameters`: full names where an end also fits stacks that no text reaches, as of vision experts.

    Args:
        base: the transformers model.
        config: the run's config.
        complete: False for a model of fewer layers, which may lack some of the stacks.

    Raises:
        ConfigError: unless each of `lora_target_parameters` is the end of names of stacks of matrices.
    """
    stacks = {
        f"{name}.{part}": weight for name, module in base.named_modules() if not isinstance(module, nn.Conv1d)
        for part, weight in module.named_parameters(recurse=False) if weight.ndim == 3
    }  # fmt: skip
    silent = {id(weight) for weight in silent_weights(base)}
    reached = [name for name, weight in stacks.items() if id(weight) not in silent]
    reached = [name for name in reached if name not in reach_noted(base).unreached]
    targets: list[str] = []
    for target in config.lora_target_parameters:
        fitting = [name for name in stacks if f".{name}".endswith(f".{target}")]
        usable = [name for name in fitting if name in reached]
        if complete and not usable:
            ends = sorted({".".join(name.split(".")[-2:]) for name in reached})
            remedy = f"use some of {', '.join(ends)}" if ends else "leave it out: it has no stacked weights"
            problem = f"matches no stack of matrices of {config.model_name_or_path}" + " that text reaches" * bool(
                fitting
            )
            raise ConfigError.about("lora_target_parameters", target, problem, remedy)
        targets += [target] if usable == fitting else usable
    return targets


def adapter_lines(model: Any) -> list[str]:
    """Log lines about which modules have adapters and which large weights have none; empty without adapters.

    Args:
        model: a transformers or peft model.
    """
    stacks: list[str] = getattr(model, "targeted_parameter_names", [])
    targeted = [*getattr(model, "targeted_module_names", []), *stacks]
    if not targeted:
        return []
    base = model.get_base_model()
    counts = Counter(name.rpartition(".")[2] for name in targeted)
    lines = ["adapters on: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))]
    if not has_experts(base.config.get_text_config()):
        return lines
    routers = [name for name in router_names(base) if not _children(base, name) and "lora_" not in name]
    adapted = {name.rpartition(".")[2] for name in stacks}
    fused = Counter(
        end
        for name, weight in base.named_parameters()
        if (end := name.rpartition(".")[2]) not in adapted and weight.ndim == 3 and "lora_" not in name
    )
    bare = [name for name in routers if not any(name == target or name.startswith(f"{target}.") for target in targeted)]
    if bare:
        nameable = any(isinstance(base.get_submodule(name), nn.Linear) for name in bare)
        exception = ", unless they are named" if nameable else ""
        lines.append(f"no adapters on: the {len(bare)} routers and gates of the experts{exception}")
    if fused:
        weights = ", ".join(f"{name} {count}" for name, count in sorted(fused.items()))
        lines.append(
            f"no adapters on: the experts' own weights ({weights}), stored as one tensor per layer; "
            "lora_target_parameters names those to adapt"
        )
    return lines


def _children(base: nn.Module, name: str) -> bool:
    return any(True for _ in base.get_submodule(name).children())
