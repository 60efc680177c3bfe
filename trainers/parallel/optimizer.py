"""Builds optimizers: torch's fused AdamW, another for bf16 weights and 8-bit states, and those of other files.

The 8-bit states of bitsandbytes (https://arxiv.org/abs/2110.02861) and torchao change when they are dequantized and
quantized again. These do not, so checkpoints can store plain fp32 states and a resumed run continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.nn import functional

from trainers.config.mistakes import ConfigError
from trainers.config.optimizer_options import AVERAGE, SCHEDULE_FREE
from trainers.config.options import TrainConfig
from trainers.parallel.adafactor import Adafactor
from trainers.parallel.lion import Lion
from trainers.parallel.muon import Muon, is_hidden_matrix
from trainers.parallel.schedule_free import ScheduleFreeAdamW
from trainers.parallel.shards import local_part
from trainers.run.disk import is_embedding, is_expert

BLOCK = 256
"""Number of elements that share a scale."""
SMALLEST = 4096
"""Weights with fewer local elements keep fp32 states: norms and biases are small, and sensitive to rounding."""
CHUNK = 2**24
"""Number of elements to update at once; limits each temporary fp32 tensor to 64 MiB."""
KEYS = ("exp_avg", "exp_avg_sq")


def parameter_groups(
    trained: list[tuple[str, nn.Parameter]], shapes: dict[str, torch.Size], config: TrainConfig
) -> list[dict[str, Any]]:
    """Parameter groups of the optimizer: weight decay applies to matrices, not to norms and biases.

    Args:
        trained: names and weights, which a strategy may have sharded and flattened.
        shapes: shapes of the unsharded weights by name.
        config: the run's config.

    Returns:
        Each with the `names` of its weights, a `rate_factor`, by which the learning rate is multiplied, `matrix`:
        whether they have rows and columns, and `hidden`: whether Muon updates them.

    Raises:
        ConfigError: if Muon would leave the experts of a mixture, most of its weights, to AdamW.
    """
    by_kind: dict[tuple[bool, float, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, weight in trained:
        faster = "lora_B" in name or "lora_embedding_B" in name or len(shapes[name]) == 1  # as peft has it
        factor = config.loraplus_lr_ratio if faster and config.method != "full" else 1.0
        if config.embedding_learning_rate is not None and is_embedding(name):
            factor = config.embedding_learning_rate / config.learning_rate
        if config.optim == "muon" and len(shapes[name]) > 2 and is_expert(name):
            problem = f": {name} stacks the experts of a layer, and Muon takes matrices"
            raise ConfigError.about("optim", config.optim, problem, "use adamw or lion")
        hidden = config.optim == "muon" and is_hidden_matrix(name, shapes[name])
        by_kind.setdefault((len(shapes[name]) >= 2, factor, hidden), []).append((name, weight))
    if config.optim == "muon" and not any(hidden for _, _, hidden in by_kind):
        problem = "finds no matrix in a layer among the trained weights, and would leave all of them to AdamW"
        raise ConfigError.about("optim", config.optim, problem, "use adamw or lion")
    return [
        {
            "params": [weight for _, weight in weights],
            "names": [name for name, _ in weights],
            "weight_decay": config.weight_decay * matrix,
            "rate_factor": factor,
            "matrix": matrix,
            "hidden": hidden,
        }
        for (matrix, factor, hidden), weights in sorted(by_kind.items(), key=lambda kind: kind[0], reverse=True)
    ]


def build_optimizer(groups: list[dict[str, Any]], config: TrainConfig) -> torch.optim.Optimizer:
    """Builds the config's optimizer over the trained weights. The loop sets its learning rate at every step."""
    if config.optim == "lion":
        return Lion(groups, config.scaled_learning_rate(), (config.lion_beta1, config.lion_beta2))
    if config.optim == "adafactor":
        return Adafactor(groups, config.scaled_learning_rate())
    settings: dict[str, Any] = {
        "lr": config.scaled_learning_rate(),
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
    }
    if config.optim == SCHEDULE_FREE:
        return ScheduleFreeAdamW(groups, **settings, warmup_steps=config.warmup_steps)
    if config.optim == "muon":
        return Muon(groups, momentum=config.muon_momentum, **settings)
    if config.small_optimizer():
        return SmallAdamW(groups, **settings, eight_bit=config.optim == "adamw_8bit", seed=config.seed)
    return torch.optim.AdamW(groups, **settings, fused=True)


class Codes:
    """A vector of fp32 numbers stored in 8 bits each, with one scale per `BLOCK` elements.

    Writing what was read changes nothing: the largest element of a block is exactly 1 or -1 times its scale.

    Args:
        size: number of elements.
        signed: False for numbers that are never negative, which use all codes for the positive range.
        device: device of codes and scales.
    """

    def __init__(self, size: int, signed: bool, device: torch.device):
        self.size, self.signed, self.values = size, signed, _values(signed, device)
        self.codes = torch.full((size,), 127 if signed else 0, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(-(-size // BLOCK), device=device)

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Dequantizes elements `start` to `stop` to fp32; `start` must be a multiple of `BLOCK`."""
        codes = self.codes[start:stop]
        scales = self.scales[start // BLOCK : -(-(start + len(codes)) // BLOCK)]
        return self.values[codes.int()] * scales.repeat_interleave(BLOCK)[: len(codes)]

    def write(self, numbers: torch.Tensor, start: int = 0, chance: torch.Generator | None = None) -> None:
        """Quantizes numbers to one of their two neighboring codes each.

        Args:
            numbers: `[count]` fp32 numbers.
            start: index of the first element to write, a multiple of `BLOCK`.
            chance: generator for stochastic rounding; None rounds to nearest. With the latter, a mean that moves by
                less than half a code per update would never change.
        """
        count = numbers.numel()
        blocks = functional.pad(numbers, (0, -count % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(-1)
        shares = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).view(-1)[:count]
        # Find the two codes around each number, then choose between them.
        below = torch.bucketize(shares, self.values, right=True, out_int32=True).sub_(1).clamp_(0, len(self.values) - 2)
        low, high = self.values[below], self.values[below + 1]
        bound = 0.5 if chance is None else torch.rand(count, device=shares.device, generator=chance)
        codes = below + ((shares - low) / (high - low) > bound)
        if not self.signed:  # a mean square rounded to 0 would make its update huge
            codes = torch.where(shares > 0, codes.clamp(min=1), codes)
        self.codes[start : start + count] = codes.to(torch.uint8)
        self.scales[start // BLOCK : start // BLOCK + len(scales)] = scales


@cache
def _values(signed: bool, device: torch.device) -> torch.Tensor:
    """The values of the codes, ascending: 0, 1 and floats between with 3 mantissa bits over 16 (signed) or 32 octaves.

    Returns:
        `[255]` values, symmetric around 0, if signed; otherwise `[256]`.
    """
    powers = range(1, 17 if signed else 33)
    floats = sorted({1.0, *((8 + part) / 8 * 2.0**-power for power in powers for part in range(8))})[2:]
    below = [-value for value in reversed(floats)] if signed else []
    return torch.tensor([*below, 0.0, *floats], dtype=torch.float32, device=device)


class SmallAdamW(torch.optim.Optimizer):
    """AdamW computed in fp32, with weights stored in fp32 or bf16 and states in fp32 or 8 bits.

    bf16 weights are rounded stochastically (https://arxiv.org/abs/2010.06192), so that updates smaller than half a bf16
    step accumulate. Random numbers depend only on seed, weight and update count, so replicas and resumed runs agree.

    Args:
        groups, lr, betas, eps: see `torch.optim.AdamW`.
        eight_bit: store the states of weights with at least `SMALLEST` local elements as `Codes`.
        seed: seed of the stochastic rounding.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, eight_bit: bool,
        seed: int,
    ):  # fmt: skip
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.eight_bit, self.seed = eight_bit, seed
        self._chance: dict[torch.device, torch.Generator] = {}

    def empty_state(self, weight: torch.Tensor, keys: Iterable[str], step: float) -> dict[str, Any]:
        """Zero state of a weight: `[local elements]` per key, as stored, and the update count on the CPU."""
        local = local_part(weight)
        size, device = local.numel(), local.device
        coded = self.eight_bit and size >= SMALLEST
        state: dict[str, Any] = {"step": torch.tensor(step)}
        for key in keys:
            as_codes = coded and key in KEYS
            state[key] = Codes(size, key == "exp_avg", device) if as_codes else torch.zeros(size, device=device)
        return state

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
        """Updates one weight, chunk by chunk."""
        (beta1, beta2), rate, step = group["betas"], group["lr"], float(state["step"])
        size = rate / (1 - beta1**step)
        root = (1 - beta2**step) ** 0.5
        chance = self._seeded(weight.device, index, int(step))
        for start in range(0, weight.numel(), CHUNK):
            chunk = slice(start, min(start + CHUNK, weight.numel()))
            # Compute the update in fp32; `mean` and `square` are views of fp32 states, or copies of 8-bit ones.
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
        return chance.manual_seed(crc32(f"{self.seed} {step} {index}".encode()))  # CPU generators use 32 bits


def means_of(optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """States of matrices, by name, that have another shape and are the same on every rank; only Adafactor has any."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner.means if isinstance(inner, Adafactor) else {}


def empty_state(optimizer: Any, weight: torch.Tensor, keys: Iterable[str], step: float) -> dict[str, Any]:
    """Zero state of a weight in the optimizer's format.

    Args:
        optimizer: a result of `build_optimizer`, wrapped by Accelerate or not.
        weight: the weight, possibly a DTensor.
        keys: names of the state tensors.
        step: the update count.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if isinstance(inner, SmallAdamW):
        return inner.empty_state(weight, keys, step)
    count = update_count(step, keys, local_part(weight).device)
    return {"step": count, **{key: torch.zeros_like(weight, requires_grad=False) for key in keys}}


def update_count(step: float, keys: Iterable[str], device: torch.device) -> torch.Tensor:
    """The update count in a weight's state: fused AdamW's is on the weight's device.

    Others have theirs on the CPU, where reading it does not wait for the device.
    """
    return torch.tensor(step, dtype=torch.float32, device=device if {*KEYS} <= {*keys} else "cpu")


@torch.no_grad()
def update_average(weights: Iterable[tuple[torch.Tensor, dict[str, Any]]], decay: float) -> None:
    """Moves the moving average of each weight towards it, as `torch.optim.swa_utils.get_ema_multi_avg_fn` does.

    The average is a state of the optimizer, so that it is sharded, saved and loaded as the others are. It begins as
    the weights after the first update. No collective, and no wait for the device.

    Args:
        weights: local part and state of each weight, or of each flat tensor of weights, after an update.
        decay: share of the average that stays.
    """
    for weight, state in weights:
        if not state:  # no elements on this rank
            continue
        if AVERAGE in state:
            local_part(state[AVERAGE]).view(-1).lerp_(weight.reshape(-1).float(), 1 - decay)
        else:
            state[AVERAGE] = weight.reshape(-1).to(torch.float32, copy=True)


def state_vectors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A weight's local state as `[local elements]` fp32 vectors: views, or CPU copies for `Codes`."""
    return {
        key: value.read().cpu() if isinstance(value, Codes) else local_part(value).reshape(-1)
        for key, value in state.items()
        if key != "step"
    }


def write_state_vectors(state: dict[str, Any], vectors: dict[str, torch.Tensor]) -> None:
    """Writes modified `state_vectors` back to the state where they are copies."""
    for key, value in state.items():
        if isinstance(value, Codes):
            value.write(vectors[key].to(value.codes.device))


def _read(values: torch.Tensor | Codes, chunk: slice) -> torch.Tensor:
    """fp32 numbers to modify in place; those of `Codes` are a copy that must be written back."""
    return values.read(chunk.start, chunk.stop) if isinstance(values, Codes) else values[chunk]


def rounded_by_chance(values: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """Rounds fp32 numbers stochastically to one of the two nearest bf16 values, without bias."""
    bits = values.view(torch.int32)
    noise = torch.randint(0, 2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=chance)
    return (bits + noise).bitwise_and_(-(2**16)).view(torch.float32).to(torch.bfloat16)
