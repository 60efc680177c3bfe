"""Asked equals got: every run begins with this check, or stops.

Accelerate falls back in silence (one process for two, plain DDP for FSDP); what was not asked for is not trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainers.config.options import TrainConfig
from trainers.model.attention import KERNELS
from trainers.model.fp8 import fitting_layers
from trainers.model.load import base_dtype, compute_dtype, silent_weights
from trainers.model.quantization import four_bit_layers, whole_layers
from trainers.objectives.sft import SupervisedLoss
from trainers.parallel.backend import Backend
from trainers.parallel.ranks import Ranks
from trainers.run.errors import TrainingError
from trainers.strategy.mesh import Mesh, MeshSizes
from trainers.strategy.strategy import Strategy


@dataclass(frozen=True)
class Line:
    """One thing that was asked for and what it turned out to be."""

    what: str
    asked: str
    got: str


class Census:
    """The dtypes that leave the linear layers and the norms while it is open.

    Args:
        loss: the loss module; the wrappers around it are looked through.
    """

    def __init__(self, loss: SupervisedLoss):
        self.linear, self.norms, self._hooks = set[str](), set[str](), list[Any]()
        for module in loss.modules():
            if isinstance(module, nn.Linear):
                self._hooks.append(module.register_forward_hook(self._note(self.linear)))
            elif "Norm" in type(module).__name__:
                self._hooks.append(module.register_forward_hook(self._note(self.norms)))

    def _note(self, seen: set[str]) -> Callable[..., None]:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):  # a router may be a linear layer that gives several
                seen.add(_name(output.dtype))

        return note

    def __enter__(self) -> Census:
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtypes(weights: list[nn.Parameter]) -> str:
    return ", ".join(sorted({_name(weight.dtype) for weight in weights})) or "none"


def compare(
    strategy: Strategy, config: TrainConfig, accelerator: Any, mesh: Mesh, backend: Backend, loss: SupervisedLoss,
    census: Census,
) -> list[Line]:  # fmt: skip
    """What was asked for beside what this rank got, line by line."""
    weights = list(backend.model.parameters())
    trained = [weight for weight in weights if weight.requires_grad]
    frozen = [weight for weight in weights if not weight.requires_grad]
    freezes = config.method != "full" or bool(silent_weights(loss.base))
    frozen_dtype = _name(base_dtype(config)) if freezes else "none"
    wrapper, kernel = type(backend.model).__name__, str(loss.base.config._attn_implementation)
    return [
        Line("processes", str(strategy.num_processes), str(accelerator.num_processes)),
        Line("distributed type", strategy.distributed_type, accelerator.distributed_type.value),
        Line("wrapper", strategy.wrapped_class or "none", "none" if wrapper == "SupervisedLoss" else wrapper),
        *_layout(strategy, mesh, backend),
        Line("trained weights", "float32" if config.master_weights else "bfloat16", _dtypes(trained)),
        Line("frozen weights", frozen_dtype, _dtypes(frozen)),
        *([_float8(loss)] if config.mixed_precision == "fp8" else []),
        *(_four_bits(strategy, backend, loss) if config.method == "qlora" else []),
        Line("matrix products", _name(compute_dtype(config)), ", ".join(sorted(census.linear))),
        Line("own accumulation", "1", str(accelerator.gradient_accumulation_steps)),
        Line("attention", KERNELS.get(config.attn_implementation, kernel), kernel),
    ]


def _float8(loss: SupervisedLoss) -> Line:
    """Every linear layer of the decoder whose sizes float8 kernels take is torchao's."""
    kinds = [type(module).__name__ for module in loss.base.get_decoder().modules()]
    return Line("float8 layers", str(len(fitting_layers(loss.base))), str(kinds.count("Float8Linear")))


def _four_bits(strategy: Strategy, backend: Backend, loss: SupervisedLoss) -> list[Line]:
    """Half a byte per weight in every linear layer but the output head, and cut like all others where weights are cut.

    Accelerate leaves 4-bit weights of an integer dtype whole on every rank, with a warning.
    """
    layers = four_bit_layers(loss.model)
    whole = whole_layers(loss.model, loss.base.get_output_embeddings())
    lines = [Line("4-bit layers", str(len(layers)), str(whole))]
    if strategy.sharded:
        weights: list[Any] = [layer.weight for layer in layers]
        here = sum(one.to_local().numel() if isinstance(one, DTensor) else one.numel() for one in weights)
        lines.append(_share("4-bit share", here, sum(one.numel() for one in weights), backend.held()[2]))
    return lines


def _share(what: str, here: int, whole: int, ways: int) -> Line:
    """How much of what is cut is on this rank. Weights that do not divide make a share a little larger or smaller."""
    even = abs(here * ways / max(whole, 1) - 1) < 0.25
    return Line(what, f"1/{ways}", f"1/{ways}" if even else f"{here / max(whole, 1):.3f}")


def _layout(strategy: Strategy, mesh: Mesh, backend: Backend) -> list[Line]:
    """How weights are spread: mesh, ZeRO stage, share of the trained weights on this rank, offload."""
    lines = []
    if strategy.has_mesh:
        built: Any = mesh.device_mesh
        got = MeshSizes(**dict(zip(built.mesh_dim_names, built.shape, strict=True)))
        lines.append(Line("mesh", str(strategy.sizes), str(got)))
    if strategy.zero_stage:
        zero: Any = backend
        lines.append(Line("ZeRO stage", str(strategy.zero_stage), str(zero.model.zero_optimization_stage())))
        settings = zero.model.config["zero_optimization"]
        places = {(settings.get(f"offload_{what}") or {}).get("device", "none") for what in ("optimizer", "param")}
        if "nvme" in places and not zero.on_disk():  # DeepSpeed keeps what is small in memory
            places = places - {"nvme"} | {"cpu"}
        got_place = next((place for place in ("nvme", "cpu") if place in places), "none")
        lines.append(Line("offload", strategy.offload, got_place))
        if strategy.second_copies > 1:
            second = [one for one in zero.model.module.parameters() if one.ds_secondary_tensor is not None]
            ways = {one.ds_secondary_tensor_group_size for one in second}
            lines.append(
                Line("second copies", f"over {strategy.second_copies}", f"over {', '.join(map(str, sorted(ways)))}")
            )
    if strategy.sharded or strategy.zero_stage or getattr(backend, "tensor", None) is not None:
        what = "Adam's share" if strategy.zero_stage in (1, 2) else "weights held"
        lines.append(_share(what, *backend.held()))
    return lines


def check(lines: list[Line], ranks: Ranks) -> None:
    """Stops the run when any rank got something else.

    Raises:
        TrainingError: with both values of each mismatch.
    """
    wrong = [f"{line.what}: asked {line.asked}, got {line.got}" for line in lines if line.asked != line.got]
    problem = TrainingError("; ".join(wrong)) if wrong else None
    if problem is not None and ranks.world == 1:
        raise TrainingError(f"this is not the run that was asked for: {problem}")
    ranks.agree(problem, "checking that this is the run that was asked for")


def table(lines: list[Line], ranks: Ranks, backend: Backend, census: Census, memory: list[tuple[float, float]]) -> str:
    """The check as rank 0 prints it.

    Args:
        memory: GiB of each rank before and after wrapping.
    """
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else ranks.device.type
    trained = sum(one.numel for one in backend.shards())
    rows = [(line.what, line.got) for line in lines]
    rows += [("norms", ", ".join(sorted(census.norms))), ("device", device), ("weights", f"{trained:,} trained")]
    rows += [("memory", "; ".join(f"rank {rank} {a:.2f} -> {b:.2f} GiB" for rank, (a, b) in enumerate(memory)))]
    return "\n".join(f"  {what:<16} {value}" for what, value in rows)
