"""One rank that builds a model under a strategy, and compares what it keeps with the whole model, bit for bit.

    accelerate launch --config_file FILE tests/unit/parallel/loading_ranks.py FOLDER OPTIONS STRATEGY [alone]

FOLDER gets `RANK.json`: what differs, the bytes that this rank keeps and has read, and its peak of anonymous memory.
With `alone`, nothing is compared, as every rank would have the whole model for that.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from trainers import build
from trainers.config.validation import build as build_config
from trainers.model.load import build_model
from trainers.model.quantization import four_bit_layers
from trainers.model.stored import StoredTensor
from trainers.parallel.backend import Backend
from trainers.strategy.strategy import load_strategy, resolve


class Watch:
    """Peak of RssAnon, and bytes read, from its start to the last weight that was read."""

    def __init__(self) -> None:
        self.start = self.peak = self.loading_peak = _anonymous()
        self.read = self.first_read = _bytes_read()
        self.ended = threading.Event()
        plain, mine = StoredTensor.read, self

        def read(tensor: StoredTensor, target: torch.Tensor, part: tuple[slice, ...] = ()) -> None:
            plain(tensor, target, part)
            mine.loading_peak, mine.read = max(mine.peak, _anonymous()), _bytes_read()

        StoredTensor.read = read  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        while not self.ended.wait(0.002):
            self.peak = max(self.peak, _anonymous())

    def end(self) -> dict[str, int]:
        self.ended.set()
        self.thread.join()
        return {
            "peak": self.loading_peak - self.start, "wrap_peak": self.peak - self.start,
            "read": self.read - self.first_read,
        }  # fmt: skip


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def _bytes_read() -> int:
    return int(psutil.Process().io_counters().read_chars)


def kept(name: str, weight: Any, loss: Any) -> tuple[torch.Tensor, Any]:
    """What this rank has of a weight, and a function that takes the same part of the whole weight."""

    def cut(whole: torch.Tensor) -> torch.Tensor:
        cut = loss.tensor.slices.get(name) if loss.tensor else None
        return whole if cut is None else whole[cut.slices]

    if isinstance(weight, DTensor):
        return weight.full_tensor(), cut
    if hasattr(weight, "ds_tensor"):
        local = weight.ds_tensor.flatten()
        start = local.numel() * torch.distributed.get_rank()
        count = max(0, min(local.numel(), weight.ds_numel - start))
        return local[:count], lambda whole: whole.flatten()[start : start + count]
    return weight, cut


def differences(backend: Backend, loss: Any, config: Any) -> dict[str, Any]:
    """Names of weights and buffers that are not as in the whole model, and the bytes kept of all."""
    whole = build_model(config)
    mine, wrapped = loss.model, backend.model
    full = FullyShardedDataParallel.summon_full_params(wrapped, writeback=False)
    with full if isinstance(wrapped, FullyShardedDataParallel) else nullcontext():
        found = {name.replace("_fsdp_wrapped_module.", ""): weight for name, weight in mine.named_parameters()}
        wrong, expected = [], dict(whole.named_parameters(remove_duplicate=False))
        for name, weight in found.items():
            value, cut = kept(name, weight, loss)
            other = cut(expected[name].detach())
            same = value.dtype == other.dtype and weight.requires_grad == expected[name].requires_grad
            if not same or not _same_bits(value.detach().cpu().reshape(other.shape), other):
                wrong.append(name)
    pairs = zip(four_bit_layers(mine), four_bit_layers(whole), strict=True)
    wrong += [f"scales of layer {index}" for index, pair in enumerate(pairs) if not _same_scales(*pair)]
    buffers = dict(whole.named_buffers())
    wrong += [
        name
        for name, buffer in mine.named_buffers()
        if not torch.equal(buffer, buffers[name.replace("_fsdp_wrapped_module.", "")])
    ]
    return {"wrong": wrong, "names": sorted(found), "all": sorted(expected)}


def _same_bits(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Also where 4-bit weights look like numbers that are none."""
    bits, other_bits = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (value, other))
    return torch.equal(bits, other_bits)


def _same_scales(layer: Any, other: Any) -> bool:
    one, two = layer.quant_state, other.quant_state
    pairs = [(one.absmax, two.absmax), (one.offset, two.offset), (one.state2.absmax, two.state2.absmax)]
    return one.shape == two.shape and all(torch.equal(*pair) for pair in pairs)


def bytes_kept(model: Any) -> int:
    local = [getattr(weight, "ds_tensor", weight) for weight in model.parameters()]
    local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in local]
    return sum(tensor.numel() * tensor.element_size() for tensor in [*local, *model.buffers()])


def main(folder: Path, options: dict[str, Any], name: str, alone: bool) -> None:
    config = build_config(options)
    strategy = load_strategy(name)
    strategy = resolve(strategy, int(os.environ.get("WORLD_SIZE", "1")), config.mixed_precision, config.pp_size,
                       config.pp_schedule)  # fmt: skip
    accelerator, ranks, mesh = build.accelerator(config, strategy)
    watch = Watch()
    loss = build.module(config, main_rank=False)
    backend, _ = build.backend(config, strategy, accelerator, ranks, mesh, loss)
    found = watch.end()
    for module in backend.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # which it leaves to the next pass
    found |= {"kept": bytes_kept(loss.model)}
    found |= {} if alone else differences(backend, loss, config)
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))
    del backend, loss
    build.tear_down(accelerator, ranks, SimpleNamespace(sampler=None))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], len(sys.argv) > 4)
