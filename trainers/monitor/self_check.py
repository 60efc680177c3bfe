"""Checks at the start of every run that it is set up as requested, and stops it otherwise.

Accelerate falls back silently (one process instead of two, plain DDP instead of FSDP).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from trainers.config.options import TrainConfig
from trainers.model.attention import KERNELS
from trainers.model.fp8 import fitting_layers
from trainers.model.load import base_dtype, compute_dtype
from trainers.model.qat import rounded_layers, rounding_layers
from trainers.model.quantization import four_bit_layers, whole_layers
from trainers.model.reachability import reach_noted, silent_weights
from trainers.objectives.loss_module import LossModule
from trainers.objectives.output_head import decoder_of, scalar_head
from trainers.parallel.backend import Backend
from trainers.parallel.ranks import Ranks
from trainers.run.errors import TrainingError
from trainers.strategy.mesh import Mesh, MeshSizes
from trainers.strategy.strategy import Strategy


@dataclass(frozen=True)
class Line:
    """One property of the run: what was requested and what this rank got."""

    name: str
    requested: str
    got: str


class DtypeProbe:
    """Records the output dtypes of linear layers and norms inside the `with` block.

    Args:
        loss: the loss module, unwrapped.
    """

    def __init__(self, loss: LossModule):
        self.linear: set[str] = set()
        self.norms: set[str] = set()
        self._hooks: list[Any] = []
        head = scalar_head(loss.base)  # always in fp32: it computes a score per document
        spared = set() if head is None else set(head.modules())
        for module in loss.modules():
            if isinstance(module, nn.Linear) and module not in spared:
                self._hooks.append(module.register_forward_hook(self._note(self.linear)))
            elif "Norm" in type(module).__name__:
                self._hooks.append(module.register_forward_hook(self._note(self.norms)))

    def _note(self, seen: set[str]) -> Callable[..., None]:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):  # a router may be a linear layer that returns several tensors
                seen.add(_name(output.dtype))

        return note

    def __enter__(self) -> DtypeProbe:
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_names(weights: list[nn.Parameter]) -> str:
    return ", ".join(sorted({_name(weight.dtype) for weight in weights})) or "none"


def compare(
    strategy: Strategy, config: TrainConfig, accelerator: Any, mesh: Mesh, backend: Backend, loss: LossModule,
    dtypes: DtypeProbe,
) -> list[Line]:  # fmt: skip
    """Compares what was requested with what this rank got."""
    taught = [] if loss.teacher is None else list(loss.teacher.parameters())
    of_teacher = {id(weight) for weight in taught}
    weights = [weight for weight in backend.model.parameters() if id(weight) not in of_teacher]
    trained = [weight for weight in weights if weight.requires_grad]
    frozen = [weight for weight in weights if not weight.requires_grad]
    reach = reach_noted(loss.base)
    freezes = config.method != "full" or bool(silent_weights(loss.base) or reach.unreached or reach.fixed)
    freezes = freezes or bool(config.freeze and frozen)  # a pipeline stage may have none of them
    frozen_dtype = _name(base_dtype(config)) if freezes else "none"
    wrapper, kernel = type(backend.model).__name__, str(loss.base.config._attn_implementation)
    return [
        Line("processes", str(strategy.num_processes), str(accelerator.num_processes)),
        Line("distributed type", strategy.distributed_type, accelerator.distributed_type.value),
        *_communication(config.ddp_backend, accelerator.device.type),
        Line("wrapper", strategy.wrapped_class or "none", "none" if wrapper == "LossModule" else wrapper),
        *_layout(strategy, mesh, backend),
        Line("trained weights", "float32" if config.master_weights else "bfloat16", _dtype_names(trained)),
        Line("frozen weights", frozen_dtype, _dtype_names(frozen)),
        *(
            [Line(f"weights of the {loss.teacher.title}", _name(compute_dtype(config)), _dtype_names(taught))]
            if taught
            else []
        ),
        *([_float8(loss)] if config.mixed_precision == "fp8" else []),
        *([_rounding(loss)] if config.qat != "none" else []),
        *(_four_bits(strategy, backend, loss) if config.method == "qlora" else []),
        Line("matrix products", _name(compute_dtype(config)), ", ".join(sorted(dtypes.linear))),
        Line("own accumulation", "1", str(accelerator.gradient_accumulation_steps)),
        Line("attention", KERNELS.get(config.attn_implementation, kernel), kernel),
    ]


def _communication(requested: str, device: str) -> list[Line]:
    """The backend of collectives on the device, if there are several ranks."""
    if not distributed.is_initialized():
        return []
    by_device = dict(pair.split(":") for pair in distributed.get_backend_config().split(","))
    got = by_device.get(device, "none")
    if requested == "auto":
        requested = {"cpu": "gloo", "cuda": "nccl"}.get(device, got)
    expected = dict(pair.split(":") for pair in requested.split(",")) if ":" in requested else {device: requested}
    return [Line("communication", expected.get(device, got), got)]


def _float8(loss: LossModule) -> Line:
    """Whether every linear layer of the decoder that float8 kernels support is torchao's."""
    kinds = [type(module).__name__ for module in decoder_of(loss.base).modules()]
    return Line("float8 layers", str(len(fitting_layers(loss.base))), str(kinds.count("Float8Linear")))


def _rounding(loss: LossModule) -> Line:
    """Whether every linear layer of the decoder rounds."""
    return Line("rounding layers", str(len(rounded_layers(loss.base))), str(len(rounding_layers(loss.base))))


def _four_bits(strategy: Strategy, backend: Backend, loss: LossModule) -> list[Line]:
    """Checks for half a byte per weight in every linear layer but the output head, sharded if weights are sharded.

    Accelerate leaves 4-bit weights of an integer dtype unsharded on every rank, with only a warning.
    """
    layers = four_bit_layers(loss.model)
    unquantized = whole_layers(loss.model, loss.base.get_output_embeddings())
    lines = [Line("4-bit layers", str(len(layers)), str(unquantized))]
    if strategy.sharded:
        weights: list[Any] = [layer.weight for layer in layers]
        local = sum((weight.to_local() if isinstance(weight, DTensor) else weight).numel() for weight in weights)
        ranks = backend.local_and_total_numel()[2]
        lines.append(_share("4-bit share", local, sum(weight.numel() for weight in weights), ranks))
    return lines


def _share(name: str, local: int, total: int, ranks: int) -> Line:
    """Checks this rank's share of sharded elements; uneven weights make it slightly larger or smaller."""
    even = abs(local * ranks / max(total, 1) - 1) < 0.25
    return Line(name, f"1/{ranks}", f"1/{ranks}" if even else f"{local / max(total, 1):.3f}")


def _layout(strategy: Strategy, mesh: Mesh, backend: Backend) -> list[Line]:
    """Checks the layout of weights: mesh, ZeRO stage, share of the trained weights on this rank, offload."""
    lines = []
    if strategy.has_mesh:
        built: Any = mesh.device_mesh
        experts = 1 if mesh.expert_mesh is None else mesh.expert_mesh["ep"].size()
        got = MeshSizes(**dict(zip(built.mesh_dim_names, built.shape, strict=True)), ep=experts)
        lines.append(Line("mesh", str(strategy.sizes), str(got)))
    if strategy.zero_stage:
        zero: Any = backend
        lines.append(Line("ZeRO stage", str(strategy.zero_stage), str(zero.model.zero_optimization_stage())))
        settings = zero.model.config["zero_optimization"]
        devices = {(settings.get(f"offload_{state}") or {}).get("device", "none") for state in ("optimizer", "param")}
        if "nvme" in devices and not zero.on_disk():  # DeepSpeed keeps small tensors in memory
            devices = devices - {"nvme"} | {"cpu"}
        offload = next((device for device in ("nvme", "cpu") if device in devices), "none")
        lines.append(Line("offload", strategy.offload, offload))
        if strategy.second_copies > 1:
            copied = [weight for weight in zero.model.module.parameters() if weight.ds_secondary_tensor is not None]
            sizes = sorted({weight.ds_secondary_tensor_group_size for weight in copied})
            lines.append(Line("second copies", f"over {strategy.second_copies}", f"over {', '.join(map(str, sizes))}"))
    if strategy.sharded or strategy.zero_stage or getattr(backend, "tensor", None) is not None:
        name = "Adam's share" if strategy.zero_stage in (1, 2) else "weights held"
        name = "experts held" if strategy.ep_size > 1 else name
        lines.append(_share(name, *backend.local_and_total_numel()))
    return lines


def refuse_differences(lines: list[Line], ranks: Ranks) -> None:
    """Stops the run if any rank did not get what was requested.

    Raises:
        TrainingError: listing both values of each mismatch.
    """
    wrong = [f"{line.name}: requested {line.requested}, got {line.got}" for line in lines if line.requested != line.got]
    problem = TrainingError("; ".join(wrong)) if wrong else None
    if problem is not None and ranks.world == 1:
        raise TrainingError(f"the run is not set up as requested: {problem}")
    ranks.agree(problem, "checking that the run is set up as requested")


def table(
    lines: list[Line], ranks: Ranks, backend: Backend, dtypes: DtypeProbe, memory: list[tuple[float, float]]
) -> str:
    """The table of the check that rank 0 prints.

    Args:
        memory: GiB of each rank before and after wrapping.
    """
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else ranks.device.type
    trained = sum(shard.numel for shard in backend.shards())
    rows = [(line.name, line.got) for line in lines]
    rows += [("norms", ", ".join(sorted(dtypes.norms))), ("device", device), ("weights", f"{trained:,} trained")]
    rows += [("memory", "; ".join(f"rank {rank} {a:.2f} -> {b:.2f} GiB" for rank, (a, b) in enumerate(memory)))]
    return "\n".join(f"  {name:<16} {value}" for name, value in rows)
