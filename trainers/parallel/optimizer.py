"""AdamW: torch's fused one, and one for weights kept in bf16 and states kept in 8 bits.

Libraries have 8-bit states too (bitsandbytes, torchao). Their codes, once read, do not give the same codes back, and
a run that was interrupted would not go on as if it had not been; these do, so that checkpoints hold plain fp32 states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.nn import functional

from trainers.config.options import TrainConfig
from trainers.parallel.shards import local_part

BLOCK = 256
"""Elements that share a scale."""
SMALLEST = 4096
"""Weights with fewer elements here keep fp32 states: norms and biases are few, and matter."""
CHUNK = 2**24
"""Elements that are updated at once; all that is fp32 for a moment only is 64 MiB each."""
KEYS = ("exp_avg", "exp_avg_sq")


def parameter_groups(
    trained: list[tuple[str, nn.Parameter]], shapes: dict[str, torch.Size], config: TrainConfig
) -> list[dict[str, Any]]:
    """Trained weights for AdamW: matrices decay, norms and biases do not.

    Args:
        trained: the weights by name, which a strategy may have cut and flattened.
        shapes: of the whole weights.
    """
    matrices = [weight for name, weight in trained if len(shapes[name]) >= 2]
    vectors = [weight for name, weight in trained if len(shapes[name]) < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(groups: list[dict[str, Any]], config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW over the trained weights. The loop sets its rate at every step."""
    settings: dict[str, Any] = {
        "lr": config.scaled_learning_rate(),
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
    }
    if config.small_optimizer():
        return SmallAdamW(groups, **settings, eight_bit=config.optim == "adamw_8bit", seed=config.seed)
    return torch.optim.AdamW(groups, **settings, fused=True)


class Codes:
    """A vector of fp32 numbers in 8 bits each, with a scale for every `BLOCK` of them.

    Reading and writing it again changes nothing: the largest number of a block is 1 or -1 times its scale exactly.

    Args:
        size: elements.
        signed: False for numbers that are never below 0, which get twice the codes.
    """

    def __init__(self, size: int, signed: bool, device: torch.device):
        self.size, self.signed, self.values = size, signed, _values(signed, device)
        self.codes = torch.full((size,), 127 if signed else 0, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(-(-size // BLOCK), device=device)

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """`[stop - start]` fp32 numbers; `start` is a multiple of `BLOCK`."""
        codes = self.codes[start:stop]
        scales = self.scales[start // BLOCK : -(-(start + len(codes)) // BLOCK)]
        return self.values[codes.int()] * scales.repeat_interleave(BLOCK)[: len(codes)]

    def write(self, numbers: torch.Tensor, start: int = 0, chance: torch.Generator | None = None) -> None:
        """Keeps one of the two codes next to each number, from `start` on, a multiple of `BLOCK`.

        Args:
            chance: takes either, in proportion; the nearer one without. A mean that moves by less than half a code
                at each update would otherwise stand still.
        """
        count = numbers.numel()
        blocks = functional.pad(numbers, (0, -count % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(-1)
        shares = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).view(-1)[:count]
        below = torch.bucketize(shares, self.values, right=True, out_int32=True).sub_(1).clamp_(0, len(self.values) - 2)
        low, high = self.values[below], self.values[below + 1]
        bound = 0.5 if chance is None else torch.rand(count, device=shares.device, generator=chance)
        codes = below + ((shares - low) / (high - low) > bound)
        if not self.signed:  # a mean square that falls to 0 would divide by nothing
            codes = torch.where(shares > 0, codes.clamp(min=1), codes)
        self.codes[start : start + count] = codes.to(torch.uint8)
        self.scales[start // BLOCK : start // BLOCK + len(scales)] = scales


@cache
def _values(signed: bool, device: torch.device) -> torch.Tensor:
    """What the codes stand for: 0, 1 and floats of three bits of mantissa between, over 16 (signed) or 32 powers of 2.

    Signed: `[255]`, alike on both sides of 0. Else `[256]`.
    """
    powers = range(1, 17 if signed else 33)
    floats = sorted({1.0, *((8 + part) / 8 * 2.0**-power for power in powers for part in range(8))})[2:]
    below = [-value for value in reversed(floats)] if signed else []
    return torch.tensor([*below, 0.0, *floats], dtype=torch.float32, device=device)


class SmallAdamW(torch.optim.Optimizer):
    """AdamW computed in fp32, whose weights may rest in bf16 and whose states may rest in 8 bits.

    A bf16 weight is rounded stochastically, so that updates smaller than half a bf16 step add up.
    The chances are a function of seed, weight and update, alike on every rank and after a resume.

    Args:
        groups, lr, betas, eps: as torch's AdamW has them.
        eight_bit: keep the states of weights of at least `SMALLEST` elements as `Codes`.
        seed: of the rounding.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, eight_bit: bool,
        seed: int,
    ):  # fmt: skip
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.eight_bit, self.seed = eight_bit, seed
        self._chance: dict[torch.device, torch.Generator] = {}

    def empty_state(self, weight: torch.Tensor, keys: Iterable[str], step: float) -> dict[str, Any]:
        """Zeros for each key, `[elements of this rank]`, as they are stored, and the count of updates, on the CPU."""
        local = local_part(weight)
        size, device = local.numel(), local.device
        if self.eight_bit and size >= SMALLEST:
            return {"step": torch.tensor(step), **{key: Codes(size, key == "exp_avg", device) for key in keys}}
        return {"step": torch.tensor(step), **{key: torch.zeros(size, device=device) for key in keys}}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every weight that has a gradient."""
        assert closure is None
        weights = [(group, weight) for group in self.param_groups for weight in group["params"]]
        for index, (group, weight) in enumerate(weights):
            if weight.grad is None:
                continue
            state = self.state[weight]
            if not state:
                state.update(self.empty_state(weight, KEYS, 0.0))
            state["step"] += 1
            self._update(local_part(weight).view(-1), local_part(weight.grad).reshape(-1), state, group, index)

    def _update(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any], index: int
    ) -> None:
        """One weight, a chunk at a time."""
        (beta1, beta2), rate, step = group["betas"], group["lr"], float(state["step"])
        size = rate / (1 - beta1**step)
        root = (1 - beta2**step) ** 0.5
        chance = self._seeded(weight.device, index, int(step))
        for start in range(0, weight.numel(), CHUNK):
            chunk = slice(start, min(start + CHUNK, weight.numel()))
            slope = gradient[chunk].float()
            mean, square = (_read(state[key], chunk) for key in KEYS)
            mean = mean.lerp_(slope, 1 - beta1)
            square = square.mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
            value = weight[chunk].float().mul_(1 - rate * group["weight_decay"])
            value.addcdiv_(mean, (square.sqrt() / root).add_(group["eps"]), value=-size)
            weight[chunk] = value if weight.dtype == torch.float32 else rounded_by_chance(value, chance)
            for key, new in zip(KEYS, (mean, square), strict=True):
                if isinstance(state[key], Codes):
                    state[key].write(new, start, chance)

    def _seeded(self, device: torch.device, index: int, step: int) -> torch.Generator:
        chance = self._chance.setdefault(device, torch.Generator(device))
        return chance.manual_seed(crc32(f"{self.seed} {step} {index}".encode()))  # a CPU's takes 32 bits


def empty_state(optimizer: Any, weight: torch.Tensor, keys: Iterable[str], step: float) -> dict[str, Any]:
    """Zeros for each key, and the count of updates as the optimizer keeps it.

    Args:
        optimizer: one of `build_optimizer`, in Accelerate's wrapper or not.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if isinstance(inner, SmallAdamW):
        return inner.empty_state(weight, keys, step)
    count = torch.tensor(step, dtype=torch.float32, device=local_part(weight).device)
    return {"step": count, **{key: torch.zeros_like(weight, requires_grad=False) for key in keys}}


def state_vectors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What this rank has of a weight's state, as `[elements]` fp32 vectors: views, but copies on the CPU of `Codes`."""
    return {
        key: value.read().cpu() if isinstance(value, Codes) else local_part(value).reshape(-1)
        for key, value in state.items()
        if key != "step"
    }


def write_state_vectors(state: dict[str, Any], vectors: dict[str, torch.Tensor]) -> None:
    """Makes what was written to `state_vectors` count where they are copies."""
    for key, value in state.items():
        if isinstance(value, Codes):
            value.write(vectors[key].to(value.codes.device))


def _read(values: torch.Tensor | Codes, chunk: slice) -> torch.Tensor:
    """Numbers to be changed in place; those of `Codes` are written back."""
    return values.read(chunk.start, chunk.stop) if isinstance(values, Codes) else values[chunk]


def rounded_by_chance(values: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """fp32 numbers in bf16, each one of its two neighbours, so that the mean of many roundings is the number."""
    bits = values.view(torch.int32)
    noise = torch.randint(0, 2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=chance)
    return (bits + noise).bitwise_and_(-(2**16)).view(torch.float32).to(torch.bfloat16)
