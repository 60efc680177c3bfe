"""PiSSA (https://arxiv.org/abs/2404.02948): adapters begin as the largest singular vectors of their weight.

The base keeps the residual, so that both together are the weight. The factors `B A` of each weight are computed once,
before the first step, and checkpoints hold them: singular vectors have no sign of their own, and another machine might
compute others. The residual is never stored: it is subtracted wherever the weight is read.

LoftQ (https://arxiv.org/abs/2310.08659): adapters of a base in 4 bits begin as the largest singular vectors of what
quantisation took from the weight. The base stays as it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.model.quantization import QuantisedTensor
from trainers.model.stored import Source
from trainers.run.from_run import ADAPTER_CONFIG, ADAPTER_WEIGHTS

PREFIX = "initial."
"""Prefix of the factors' names in checkpoints."""
_NOTED = "first_adapter"
"""Attribute of a peft model with the factors that its base lacks."""
Factors = Mapping[str, torch.Tensor]
"""fp32 tensors by `initial.MODULE.lora_A` and `initial.MODULE.lora_B`."""


class Adapted(NamedTuple):
    """A module with an adapter.

    Args:
        name: its name in the peft model.
        layer: peft's layer.
        weight: the base's weight.
        scaling: factor on the adapter's output.
    """

    name: str
    layer: Any
    weight: nn.Parameter
    scaling: float

    @property
    def stored(self) -> str:
        """Name of the base's weight."""
        return f"{self.name}.base_layer.weight"

    def factors(self, factors: Factors) -> tuple[torch.Tensor, torch.Tensor]:
        """`[rank, in]` and `[out, rank]`."""
        return factors[f"{PREFIX}{self.name}.lora_A"], factors[f"{PREFIX}{self.name}.lora_B"]


@dataclass(frozen=True)
class Residual:
    """What a base's weight is without the product of two factors.

    Args:
        matrix: where the weight comes from.
        a: `[rank, in]`.
        b: `[out, rank]`, multiplied by the scaling of the adapter.
        transposed: whether the weight is `[in, out]`, as GPT-2's are.
    """

    matrix: Source
    a: torch.Tensor
    b: torch.Tensor
    transposed: bool

    @property
    def shape(self) -> torch.Size:
        return self.matrix.shape

    def mapped(self) -> torch.Tensor:
        """All of it, in fp32."""
        full = torch.empty(self.shape)
        self.read(full)
        return full

    def read(self, target: torch.Tensor, part: tuple[slice, ...] = ()) -> None:
        """See `StoredTensor.read`."""
        if not target.numel():
            return
        rows, columns = part or (slice(0, size) for size in self.shape)
        matrix = torch.empty(target.shape)
        self.matrix.read(matrix, (rows, columns))
        outputs, inputs = (columns, rows) if self.transposed else (rows, columns)
        product = self.b[outputs] @ self.a[:, inputs]
        target.detach().copy_(matrix - (product.t() if self.transposed else product))


def adapted(model: nn.Module) -> Iterator[Adapted]:
    """The modules of a peft model that have adapters."""
    for name, layer in model.named_modules():
        if isinstance(getattr(layer, "lora_A", None), nn.ModuleDict) and "default" in layer.lora_A:
            base: Any = layer.get_base_layer()
            yield Adapted(name, layer, base.weight, layer.scaling["default"])


def _transposed(part: Adapted) -> bool:
    return bool(getattr(part.layer, "fan_in_fan_out", False))


def principal_factors(part: Adapted, stored: Mapping[str, Source]) -> list[torch.Tensor]:
    """peft's `pissa_init` in fp32: the first `[rank, in]` and `[out, rank]` of an adapter.

    Args:
        part: the module.
        stored: where weights on the meta device are to be read from.
    """
    matrix = stored[part.stored].mapped() if part.weight.is_meta else part.weight.detach()
    return _factored(matrix.t() if _transposed(part) else matrix, part)


def error_factors(part: Adapted, stored: Mapping[str, Source]) -> list[torch.Tensor]:
    """One iteration of LoftQ, as peft's `replace_lora_weights_loftq`; the arguments are those of `principal_factors`.

    peft leaves out the scaling, so that its adapters are the error where that is 1.
    """
    source = stored[part.stored]
    assert isinstance(source, QuantisedTensor)  # see `modules_to_begin`
    return _factored(source.error(), part)


def modules_to_begin(start: str, model: nn.Module, stored: Mapping[str, Source]) -> list[Adapted]:
    """The modules whose adapters begin as singular vectors: with `loftq`, only those in 4 bits, as in peft."""
    parts = adapted(model)
    return [part for part in parts if start == "pissa" or isinstance(stored.get(part.stored), QuantisedTensor)]


FACTORS = {"pissa": principal_factors, "loftq": error_factors}


def _factored(matrix: torch.Tensor, part: Adapted) -> list[torch.Tensor]:
    rank = part.layer.r["default"]
    left, values, right = torch.linalg.svd(matrix.float(), full_matrices=False)
    roots = torch.sqrt(values[:rank] / part.scaling)
    return [torch.diag(roots) @ right[:rank], left[:, :rank] @ torch.diag(roots)]


def refuse_without_vectors(config: TrainConfig, model: nn.Module) -> None:
    """Raises ConfigError if an adapter has a higher rank than its weight, or is on an embedding."""
    if config.init_lora_weights == "default":
        return
    for part in adapted(model):
        most = min(part.layer.in_features, part.layer.out_features)  # a weight in 4 bits has another shape
        if part.layer.r["default"] > most:
            problem = f"is more than the {most} singular vectors of {part.name.removeprefix('base_model.model.')}"
            remedy = "use a lower rank, or init_lora_weights=default"
            raise ConfigError.about("lora_r", part.layer.r["default"], problem, remedy)
    if embeddings := [name for name, layer in model.named_modules() if getattr(layer, "lora_embedding_A", None)]:
        problem = "is an embedding, whose adapters do not begin as singular vectors"
        raise ConfigError.about("lora_target_modules", embeddings[0].rpartition(".")[2], problem, "leave it out")


@torch.no_grad()
def begin_principal(model: nn.Module, factors: Factors) -> None:
    """Sets the adapters of a model to their first weights."""
    for part in adapted(model):
        if f"{PREFIX}{part.name}.lora_A" not in factors:
            continue
        a, b = part.factors(factors)
        part.layer.lora_A["default"].weight.copy_(a)
        part.layer.lora_B["default"].weight.copy_(b)


def first_adapter(model: nn.Module) -> Factors:
    """The first adapters that a model's weights are the residual of; empty if they are not."""
    factors: Factors = getattr(model, _NOTED, {})
    return factors


def leave_residual(model: nn.Module, stored: dict[str, Source], factors: Factors) -> None:
    """Subtracts the first adapters from the weights of a model's base, or where these are read.

    Args:
        model: the peft model.
        stored: where its weights on the meta device are to be read from; changed.
        factors: the first adapters, which the model notes.
    """
    setattr(model, _NOTED, factors)
    for part in adapted(model):
        a, b = part.factors(factors)
        b = b * part.scaling
        if part.weight.is_meta:
            stored[part.stored] = Residual(stored[part.stored], a, b, _transposed(part))
        else:
            product = (b @ a).t() if _transposed(part) else b @ a
            part.weight.data = (part.weight.data.float() - product).to(part.weight.dtype)


def save_as_plain(folder: Path, factors: Factors) -> None:
    """Makes an exported adapter one of the unchanged base, as peft's `path_initial_model_for_weight_conversion` does.

    `B A - B0 A0` is one product of twice the rank.

    Args:
        folder: the adapter, which is changed in place.
        factors: the first adapters.
    """
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    for name, first in factors.items():
        key = f"{name.removeprefix(PREFIX)}.weight"
        negated = -first if name.endswith("lora_B") else first
        tensors[key] = torch.cat([tensors[key], negated.to(tensors[key].dtype)], 1 if name.endswith("lora_B") else 0)
    save_file(tensors, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    settings = json.loads((folder / ADAPTER_CONFIG).read_text())
    factor = math.sqrt(2) if settings["use_rslora"] else 2
    settings["r"], settings["lora_alpha"] = 2 * settings["r"], factor * settings["lora_alpha"]
    settings["rank_pattern"] = {name: 2 * rank for name, rank in (settings["rank_pattern"] or {}).items()}
    settings["alpha_pattern"] = {name: factor * alpha for name, alpha in (settings["alpha_pattern"] or {}).items()}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
