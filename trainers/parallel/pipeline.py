"""Pipeline parallelism: each rank has some of the layers, and the micro-batches of a step flow through them.

The schedules are torch's. Every rank of a pipeline makes the same micro-batches from the plan, so that only hidden
states and their gradients travel. They travel flattened, in buffers with room for the largest micro-batch so far, and
each stage takes its micro-batch out of them: whatever the widths, it computes the shapes that one process computes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup, pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage

from trainers.config.options import TrainConfig
from trainers.data.batches import MicroBatch
from trainers.parallel.backend import Backend, Beat, no_beat
from trainers.parallel.norm import global_norm
from trainers.parallel.optimizer import build_optimizer, parameter_groups
from trainers.parallel.pipeline_split import (
    Absent,
    Chunk,
    LocalStages,
    PipelineStages,
    Work,
    refuse_tied_shards,
    split_model,
)
from trainers.parallel.shards import WEIGHT, Shard, local_part
from trainers.run.errors import TrainingError
from trainers.strategy.mesh import Mesh
from trainers.strategy.pipeline_schedules import SCHEDULES, measured_bubble, micro_batch_mistake, rank_of

BUCKET = 2**23
"""Elements of the gradients that are averaged in one collective."""


class Busy:
    """How long a rank computes, and does not wait for others.

    Args:
        device: a GPU is asked for its own times, and only when `seconds` is.
    """

    def __init__(self, device: torch.device):
        self.on_gpu, self.passed = device.type == "cuda", 0.0
        self.events: list[tuple[Any, Any]] = []

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around what is counted."""
        if self.on_gpu:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            yield
            events[1].record()
            self.events.append(events)
            return
        began = time.perf_counter()
        yield
        self.passed += time.perf_counter() - began

    def seconds(self) -> float:
        """Since it was last asked."""
        for began, ended in self.events:
            ended.synchronize()
            self.passed += began.elapsed_time(ended) / 1000
        seconds, self.passed = self.passed, 0.0
        self.events.clear()
        return seconds


class Stage(PipelineStage):
    """torch's stage, which takes up the documents of a micro-batch before it computes on it, and times itself."""

    submod: Chunk
    busy: Busy

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See torch."""
        self.submod.take_up(fwd_chunk_id, "forward")
        with self.busy.computing():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See torch."""
        self.submod.take_up(bwd_chunk_id, "backward")
        with self.busy.computing():
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See torch."""
        self.submod.take_up(bwd_chunk_id, "backward")
        with self.busy.computing():
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


class Pipelined(Backend):
    """A pipeline, whose schedule says which micro-batch of a step is computed when.

    Args:
        loss: the `SupervisedLoss` on the CPU, with its weights; it is split in place.
        device: of this rank.
        group: the ranks of this pipeline, first stage first.
        schedule: one of `SCHEDULES`.
        replicas: the ranks with the same stages, over which gradients are averaged; None without.
        shard_mesh: over which FSDP 2 shards the stages and averages their gradients, `[shard]` or
            `[replicate, shard]`; None without. It goes in place of `replicas`.

    Raises:
        ConfigError: when the model cannot be split into such stages.
    """

    def __init__(
        self,
        loss: Any,
        config: TrainConfig,
        device: torch.device,
        group: ProcessGroup,
        schedule: str = "1f1b",
        replicas: ProcessGroup | None = None,
        shard_mesh: DeviceMesh | None = None,
    ):
        self.device, self.group, self.schedule, self.replicas = device, group, schedule, replicas
        self.ranks, self.rank = distributed.get_world_size(group), distributed.get_rank(group)
        self.tensor, self.shard_mesh = loss.tensor, shard_mesh
        self.work, self.busy = Work(), Busy(device)
        if shard_mesh is not None:
            refuse_tied_shards(loss, schedule)
        self.local: LocalStages = split_model(loss, schedule, self.ranks, self.rank, self.work)
        gc.collect()  # the layers of other ranks are in cycles
        self.trained, self.shapes, self.tied = self.local.trained, self.local.shapes, self.local.tied
        self.stages = self.ranks * len(self.local.chunks)
        self.model = PipelineStages(loss, self.local.chunks, self.local.hidden_size, self.local.dtype).to(device)
        self.dtype = self._activation_dtype()
        if shard_mesh is not None:
            self.trained = _shard_stages(self.local, shard_mesh)
        # Counted before any forward pass: after one FSDP may leave weights gathered.
        self.local_numel = sum(local_part(weight).numel() for weight in self.model.parameters())
        self.optimizer = build_optimizer(parameter_groups(self.trained, self.shapes, config), config)
        self.last_rank = self._rank_of(self.stages - 1)
        self.starts = {name: self._start(weight) for name, weight in self.trained}
        self.primary = replicas is None or distributed.get_rank(replicas) == 0
        if shard_mesh is not None:
            self.primary = shard_mesh.ndim == 1 or shard_mesh.get_local_rank(0) == 0
        self._schedule: Any = None
        self._schedule_size = (0, 0)

    @classmethod
    def on(cls, mesh: Mesh, loss: Any, config: TrainConfig, device: torch.device, schedule: str) -> Pipelined:
        """The pipeline of this rank in a mesh: FSDP 2 where it has `dp_shard`, else gradients averaged after the step.

        Args:
            mesh: with `pp` of more than 1.
            loss, config, device, schedule: as above; `loss` is split by tensor parallelism already, where there is any.

        Raises:
            ConfigError: as above.
        """
        group, shard_mesh = mesh.group("pp"), None
        assert group is not None
        assert mesh.device_mesh is not None
        if mesh.sizes.dp_shard > 1:
            names = ("dp_replicate", "dp_shard_cp") if mesh.sizes.dp_replicate > 1 else ("dp_shard_cp",)
            shard_mesh = mesh.device_mesh[names]
        replicas = mesh.group("grad_group") if shard_mesh is None else None
        return cls(loss, config, device, group, schedule, replicas, shard_mesh)

    @torch.no_grad()
    def _activation_dtype(self) -> torch.dtype:
        """Dtype of the hidden states between stages: what a stage makes of the embedding's. Collective."""
        chunk = self.local.chunks[0]
        positions = torch.arange(2, device=self.device)[None]
        hidden = torch.zeros(1, 2, self.local.hidden_size, device=self.device, dtype=self.local.dtype)
        half = chunk.compute != torch.float32
        with torch.autocast(self.device.type, chunk.compute, enabled=half, cache_enabled=False):
            dtype = chunk.run(positions if chunk.first else hidden, positions).dtype
        by_rank: list[Any] = [None] * self.ranks
        distributed.all_gather_object(by_rank, dtype, group=self.group)
        return by_rank[0]

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        shares: Sequence[float],
        beat: Beat = no_beat,
        first_forward: AbstractContextManager[Any] | None = None,
        expert_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Backend`; collective. The loss is alike on every rank of the pipeline, and so are the micro-batches.

        Raises:
            TrainingError: when the schedule cannot take so many micro-batches.
        """
        assert expert_weights is None, "a mixture of experts cannot be split into stages"
        self._make_room(len(micro_batches), max(micro_batch.input_ids.numel() for micro_batch in micro_batches))
        self.work.beat = beat
        inputs = [micro_batch.inputs(self.device) for micro_batch in micro_batches]
        self.work.take(inputs, shares, self.device)
        # Only the numbers of the micro-batches go through the schedule: each stage has their tensors.
        numbers = torch.arange(len(micro_batches), device=self.device)
        self._schedule.step(numbers, target=numbers, losses=[], return_outputs=False)
        self.work.micro_batches = []
        beat("all-reduce")
        self._average()
        self._sum_tied()
        distributed.all_reduce(self.work.loss, group=self.group)  # the other ranks have 0
        return self.work.loss

    def _make_room(self, count: int, slots: int) -> None:
        """Stages and schedule for a number of micro-batches, with buffers that only ever grow."""
        self.work.room = max(slots, self.work.room)
        if self._schedule_size == (count, self.work.room):
            return
        if mistake := micro_batch_mistake(self.schedule, self.ranks, count):
            raise TrainingError(mistake)
        self._schedule = None  # its buffers go first
        shape = (self.work.room, self.local.hidden_size)
        activations = torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)
        number = torch.empty(1, dtype=torch.long, device="meta")
        score = torch.empty(1, device="meta", requires_grad=True)
        stages = [
            Stage(
                chunk, stage, self.stages, self.device, group=self.group,
                input_args=(number if stage == 0 else activations,),
                output_args=(score if stage == self.stages - 1 else activations,),
            )
            for stage, chunk in zip(self.local.stages, self.local.chunks, strict=True)
        ]  # fmt: skip
        for stage in stages:
            stage.busy = self.busy
        kind = getattr(pipelining, SCHEDULES[self.schedule].name)
        # Every share is given; nothing is divided by the number of micro-batches.
        settings: dict[str, Any] = {"loss_fn": lambda score, number: score, "scale_grads": False}
        self._schedule = kind(stages if SCHEDULES[self.schedule].chunks > 1 else stages[0], count, **settings)
        self._schedule_size = (count, self.work.room)

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch], beat: Beat = no_beat) -> torch.Tensor:
        """See `Backend`; collective, and alike on every rank of the pipeline.

        Each micro-batch goes through all stages before a rank takes the next; with one stage per rank, the ranks work
        at different ones meanwhile.
        """
        sums, sent = torch.zeros(2, dtype=torch.float64, device=self.device), list[Any]()
        for micro_batch in micro_batches:
            beat("evaluation")
            self.work.room = max(self.work.room, micro_batch.input_ids.numel())
            self.work.take([micro_batch.inputs(self.device)], [1.0], self.device)
            activations = torch.zeros(1, device=self.device)
            for stage, chunk in zip(self.local.stages, self.local.chunks, strict=True):
                if stage > 0 and not self._is_local(stage - 1):
                    shape = (self.work.room, self.local.hidden_size)
                    activations = torch.empty(shape, dtype=self.dtype, device=self.device)
                    distributed.recv(activations, group=self.group, group_src=self._rank_of(stage - 1))
                chunk.take_up(0, "evaluation")
                activations = chunk(activations)
                if stage < self.stages - 1 and not self._is_local(stage + 1):
                    work = distributed.isend(activations, group=self.group, group_dst=self._rank_of(stage + 1))
                    sent.append((work, activations))
            sums += torch.stack([self.work.loss.double(), self.work.correct.double()])
            while len(sent) > self.ranks:
                sent.pop(0)[0].wait()
        for work, _ in sent:
            work.wait()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        distributed.all_reduce(sums, group=self.group)
        return sums

    def _rank_of(self, stage: int) -> int:
        return rank_of(self.schedule, self.ranks, stage)

    def _is_local(self, stage: int) -> bool:
        return self._rank_of(stage) == self.rank

    def _gradients(self) -> Iterator[torch.Tensor]:
        for _, weight in self.trained:
            if weight.grad is not None:
                yield weight.grad

    def _average(self) -> None:
        """The mean of the gradients over the replicas of these stages, a few large collectives."""
        if self.replicas is None:
            return
        count, bucket = distributed.get_world_size(self.replicas), list[torch.Tensor]()
        for gradient in [*self._gradients(), None]:
            fits = gradient is not None and sum(grad.numel() for grad in [*bucket, gradient]) <= BUCKET
            if bucket and (not fits or gradient is None or gradient.dtype != bucket[0].dtype):
                flat = torch.cat([grad.reshape(-1) for grad in bucket])
                distributed.all_reduce(flat, group=self.replicas)
                means = flat.div_(count).split([grad.numel() for grad in bucket])
                for grad, mean in zip(bucket, means, strict=True):
                    grad.copy_(mean.view_as(grad))
                bucket = []
            if gradient is not None:
                bucket.append(gradient)

    def _sum_tied(self) -> None:
        """Adds the gradients of embedding and head where two ranks hold the one weight of both.

        Both add the same two numbers, so that both hold the same bits, and go on holding the same weight.
        """
        ends = {0, self.last_rank}
        if self.tied is None or len(ends) == 1 or self.rank not in ends:
            return
        gradient = dict(self.trained)[self.tied].grad
        assert gradient is not None
        local = local_part(gradient)
        other, peer = torch.empty_like(local), (ends - {self.rank}).pop()
        works = distributed.batch_isend_irecv([
            distributed.P2POp(distributed.isend, local, group=self.group, group_peer=peer),
            distributed.P2POp(distributed.irecv, other, group=self.group, group_peer=peer),
        ])  # fmt: skip
        for work in works:
            work.wait()
        local += other

    def _owns(self, name: str) -> bool:
        """Whether this rank answers for a weight that it has: for a tied one the first rank does."""
        return name != self.tied or self.rank == 0

    def clip_grad_norm(self, limit: float) -> torch.Tensor:
        """See `Backend`; over all ranks of the pipeline."""
        sliced, group = (self.tensor.slices, self.tensor.group) if self.tensor else ({}, None)
        owned = [(name, weight.grad) for name, weight in self.trained if weight.grad is not None and self._owns(name)]
        squared = global_norm(owned, sliced, group).double() ** 2
        distributed.all_reduce(squared, group=self.group)
        norm = squared.sqrt().float()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch's own does, without asking the device
        for gradient in self._gradients():
            local_part(gradient).mul_(factor)
        return norm

    def extra_metrics(self, seconds: float) -> dict[str, float]:
        """`bubble`: the share of the time in which the ranks of this pipeline waited. Collective."""
        busy: list[Any] = [None] * self.ranks
        distributed.all_gather_object(busy, self.busy.seconds(), group=self.group)
        return {"bubble": measured_bubble(busy, seconds)}

    def local_and_total_numel(self) -> tuple[int, int, int]:
        """See `Backend`; of the stages here, whose sizes differ, and frozen weights too."""
        shard_ranks = 1 if self.shard_mesh is None else self.shard_mesh.size(self.shard_mesh.ndim - 1)
        return self.local_numel, self.local.total_numel, shard_ranks * (self.tensor.size if self.tensor else 1)

    def shards(self) -> list[Shard]:
        """See `Backend`; of a weight on another rank, none of its elements."""
        shards = {name: self._weight_shard(name, weight) for name, weight in self.trained}
        for name in self.shapes.keys() - shards:
            nothing = torch.empty(0, dtype=self.local.dtypes[name], device=self.device)
            shards[name] = Shard(name, self.shapes[name], 0, {WEIGHT: nothing})
        return [shards[name] for name in self.shapes]

    def _shard(self, name: str, start: int, tensors: dict[str, torch.Tensor], step: float | None) -> Shard:
        shard = super()._shard(name, start, tensors, step)
        return shard if self._owns(name) else replace(shard, primary=False)

    def _start(self, weight: nn.Parameter) -> int:
        """Index of this rank's first element: FSDP 2 shards weights by rows."""
        if self.shard_mesh is None:
            return 0
        rows, index = weight.shape[0], self.shard_mesh.get_local_rank(self.shard_mesh.ndim - 1)
        each = -(-rows // self.shard_mesh.size(self.shard_mesh.ndim - 1))
        return min(index * each, rows) * (weight.numel() // rows)


def _shard_stages(local: LocalStages, mesh: DeviceMesh) -> list[tuple[str, nn.Parameter]]:
    """Shards the weights of each layer, and of what is beside the layers, over a mesh; returns the new trained ones."""
    owners = {
        id(weight): (module, name)
        for chunk in local.chunks
        for module in chunk.modules()
        for name, weight in module.named_parameters(recurse=False)
    }
    trained = [(name, owners[id(weight)]) for name, weight in local.trained]
    for chunk in local.chunks:
        # A stage stays gathered from its first micro-batch to its last: each would gather it again.
        for layer in chunk.decoder.layers:
            if not isinstance(layer, Absent):
                fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(chunk, mesh=mesh, reshard_after_forward=False)
    return [(name, getattr(module, attribute)) for name, (module, attribute) in trained]
