"""Pipeline parallelism: each rank holds some of the layers, and the micro-batches of a step flow through them.

The schedules are those of `torch.distributed.pipelining`. Every rank of a pipeline builds the same micro-batches from
the plan, so that only hidden states and their gradients are sent. These are flattened into buffers sized for the
largest micro-batch so far; each stage slices its micro-batch out of them and so computes the same shapes as a single
process, whatever the width of the rows.
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
from trainers.data.micro_batch import MicroBatch
from trainers.parallel.backend import Backend, Beat, no_beat
from trainers.parallel.fill import fill
from trainers.parallel.norm import global_norm, scale_gradients
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
"""Maximum number of gradient elements to average in one collective (a larger gradient gets its own)."""


class Busy:
    """Measures the time that a rank spends computing rather than waiting for other ranks.

    Args:
        device: the device of this rank; on a GPU, time is measured by CUDA events, which only `seconds` waits for.
    """

    def __init__(self, device: torch.device):
        self.on_gpu, self.passed = device.type == "cuda", 0.0
        self.events: list[tuple[Any, Any]] = []

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context manager around work that counts as computing."""
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
        """Seconds of computing since the last call."""
        for began, ended in self.events:
            ended.synchronize()
            self.passed += began.elapsed_time(ended) / 1000
        seconds, self.passed = self.passed, 0.0
        self.events.clear()
        return seconds


class Stage(PipelineStage):
    """A torch stage that selects a micro-batch's attention metadata before computing on it, and times itself."""

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
    """A pipeline; its schedule orders the forward and backward passes of a step's micro-batches.

    Args:
        loss: the `LossModule` on the CPU, with its weights; split in place.
        config: the run's config.
        device: the device of this rank.
        group: the ranks of this pipeline, first stage first.
        schedule: one of `SCHEDULES`.
        replicas: the ranks with the same stages, over which gradients are averaged; None if there are none.
        shard_mesh: mesh over which FSDP 2 shards the stages and averages their gradients, `[shard]` or
            `[replicate, shard]`; replaces `replicas`. None without FSDP.

    Raises:
        ConfigError: if the model cannot be split into these stages.
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
        gc.collect()  # reference cycles keep the layers of other ranks alive
        self.trained, self.shapes, self.tied = self.local.trained, self.local.shapes, self.local.tied
        self.stages = self.ranks * len(self.local.chunks)
        self.model = PipelineStages(loss, self.local.chunks, self.local.hidden_size, self.local.dtype)
        if shard_mesh is not None:
            self.trained = _shard_stages(self.local, shard_mesh)
        fill(loss, device)
        self.model.to(device)
        # Count before any forward pass, after which FSDP may leave weights gathered.
        self.local_numel = sum(local_part(weight).numel() for weight in self.model.parameters())
        self.dtype = self._activation_dtype()
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
        """Builds this rank's pipeline in a mesh, with FSDP 2 if `dp_shard` > 1, otherwise with replicated stages.

        Args:
            mesh: a mesh with `pp` > 1.
            loss, config, device, schedule: as above; tensor parallelism, if any, has already split `loss`.

        Raises:
            ConfigError: if the model cannot be split into these stages.
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
        """Dtype of the hidden states sent between stages, found by running the first stage. Collective."""
        by_rank: list[Any] = [None] * self.ranks
        if (chunk := self.local.chunks[0]).first:
            positions = torch.arange(2, device=self.device)[None]
            self.work.take([{"input_ids": positions, "position_ids": positions, "documents": None}], [1.0], self.device)
            self.work.room = max(self.work.room, 2)
            chunk.take_up(0, "forward")
            by_rank[self.rank] = chunk(torch.empty(0, device=self.device)).dtype
            self.reshard()
        distributed.all_gather_object(by_rank, by_rank[self.rank], group=self.group)
        return next(dtype for dtype in by_rank if dtype is not None)

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        shares: Sequence[float],
        beat: Beat = no_beat,
        first_forward: AbstractContextManager[Any] | None = None,
        expert_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Backend`. Collective; micro-batches and the returned loss are equal on every rank of the pipeline.

        Raises:
            TrainingError: if the schedule does not support this number of micro-batches.
        """
        assert expert_weights is None, "a mixture of experts cannot be split into stages"
        self._make_room(len(micro_batches), max(micro_batch.input_ids.numel() for micro_batch in micro_batches))
        self.work.beat = beat
        inputs = [micro_batch.inputs(self.device) for micro_batch in micro_batches]
        self.work.take(inputs, shares, self.device)
        # Pass only indices of micro-batches through the schedule: `work` holds their tensors on every rank.
        numbers = torch.arange(len(micro_batches), device=self.device)
        self._schedule.step(numbers, target=numbers, losses=[], return_outputs=False)
        self.work.micro_batches = []
        beat("all-reduce")
        self._average()
        self._sum_tied()
        sums = torch.cat([self.work.loss.reshape(1), self.work.by_source])
        distributed.all_reduce(sums, group=self.group)  # 0 on all ranks but the last stage's
        return sums[0], sums[1:]

    def _make_room(self, count: int, slots: int) -> None:
        """Rebuilds stages and schedule if the number of micro-batches changed or `slots` exceed the buffers.

        Args:
            count: micro-batches of the step.
            slots: tokens of its largest micro-batch, padding included.
        """
        self.work.room = max(slots, self.work.room)
        if self._schedule_size == (count, self.work.room):
            return
        if mistake := micro_batch_mistake(self.schedule, self.ranks, count):
            raise TrainingError(mistake)
        self._schedule = None  # free its buffers before allocating new ones
        # Meta tensors declare what each stage receives and sends, so that torch need not infer it by a forward pass.
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
        # The last stage already returns a scaled loss: pass it through, and do not divide by the micro-batches.
        settings: dict[str, Any] = {"loss_fn": lambda score, number: score, "scale_grads": False}
        self._schedule = kind(stages if SCHEDULES[self.schedule].chunks > 1 else stages[0], count, **settings)
        self._schedule_size = (count, self.work.room)

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch], beat: Beat = no_beat) -> torch.Tensor:
        """See `Backend`. Collective; the result is equal on every rank of the pipeline.

        A rank runs all of its stages on a micro-batch before it starts the next one. With one stage per rank, the
        ranks work on different micro-batches at the same time.
        """
        sums, sent = torch.zeros(2, dtype=torch.float64, device=self.device), list[Any]()
        for micro_batch in micro_batches:
            beat("evaluation")
            self.work.room = max(self.work.room, micro_batch.input_ids.numel())
            self.work.take([micro_batch.inputs(self.device)], [1.0], self.device)
            activations = torch.zeros(1, device=self.device)
            for stage, chunk in zip(self.local.stages, self.local.chunks, strict=True):
                # Receive from and send to neighboring stages, unless they are on this rank too.
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
            # Bound the number of unfinished sends, and so the activations that they keep alive.
            while len(sent) > self.ranks:
                sent.pop(0)[0].wait()
        for work, _ in sent:
            work.wait()
        self.reshard()
        distributed.all_reduce(sums, group=self.group)
        return sums

    def reshard(self) -> None:
        """See `Backend`; FSDP leaves weights gathered without a backward pass."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _rank_of(self, stage: int) -> int:
        return rank_of(self.schedule, self.ranks, stage)

    def _is_local(self, stage: int) -> bool:
        return self._rank_of(stage) == self.rank

    def _gradients(self) -> Iterator[torch.Tensor]:
        for _, weight in self.trained:
            if weight.grad is not None:
                yield weight.grad

    def _average(self) -> None:
        """Averages the gradients over the replicas of these stages, in few large collectives."""
        if self.replicas is None:
            return
        count, bucket = distributed.get_world_size(self.replicas), list[torch.Tensor]()
        # Fill a bucket with gradients of one dtype; reduce it when full, and once more at the end (None).
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
        """Sums the gradients of tied embedding and head if two ranks each hold a copy of the weight.

        Both ranks add the same two tensors, so their copies stay bit-identical.
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
        """Whether this rank, which holds a weight, counts and saves it; the first rank owns a tied weight."""
        return name != self.tied or self.rank == 0

    def clip_grad_norm(self, limit: float) -> torch.Tensor:
        """See `Backend`; collective over the pipeline."""
        sliced, group = (self.tensor.slices, self.tensor.group) if self.tensor else ({}, None)
        owned = [(name, weight.grad) for name, weight in self.trained if weight.grad is not None and self._owns(name)]
        squared = global_norm(owned, sliced, group).double() ** 2
        distributed.all_reduce(squared, group=self.group)
        norm = squared.sqrt().float()
        scale_gradients(list(self._gradients()), norm, limit)
        return norm

    def extra_metrics(self, seconds: float) -> dict[str, float]:
        """`bubble`: the fraction of time that the ranks of this pipeline spent waiting. Collective."""
        busy: list[Any] = [None] * self.ranks
        distributed.all_gather_object(busy, self.busy.seconds(), group=self.group)
        return {"bubble": measured_bubble(busy, seconds)}

    def local_and_total_numel(self) -> tuple[int, int, int]:
        """See `Backend`; counts this rank's stages, which differ in size, including frozen weights."""
        shard_ranks = 1 if self.shard_mesh is None else self.shard_mesh.size(self.shard_mesh.ndim - 1)
        return self.local_numel, self.local.total_numel, shard_ranks * (self.tensor.size if self.tensor else 1)

    def shards(self) -> list[Shard]:
        """See `Backend`; includes an empty shard for each weight on another rank of the pipeline."""
        shards = {name: self._weight_shard(name, weight) for name, weight in self.trained}
        for name in self.shapes.keys() - shards:
            nothing = torch.empty(0, dtype=self.local.dtypes[name], device=self.device)
            shards[name] = Shard(name, self.shapes[name], 0, {WEIGHT: nothing})
        return [shards[name] for name in self.shapes]

    def _shard(self, name: str, start: int, tensors: dict[str, torch.Tensor], step: float | None) -> Shard:
        shard = super()._shard(name, start, tensors, step)
        return shard if self._owns(name) else replace(shard, primary=False)

    def _start(self, weight: nn.Parameter) -> int:
        """Index of this rank's first element of a weight; FSDP 2 shards weights by rows."""
        if self.shard_mesh is None:
            return 0
        rows, index = weight.shape[0], self.shard_mesh.get_local_rank(self.shard_mesh.ndim - 1)
        each = -(-rows // self.shard_mesh.size(self.shard_mesh.ndim - 1))
        return min(index * each, rows) * (weight.numel() // rows)


def _shard_stages(local: LocalStages, mesh: DeviceMesh) -> list[tuple[str, nn.Parameter]]:
    """Applies FSDP 2 to each layer and to the remaining weights of each stage; returns the new trained parameters."""
    # FSDP replaces parameters: remember the module and attribute of each, to find its replacement by name.
    owners = {
        id(weight): (module, name)
        for chunk in local.chunks
        for module in chunk.modules()
        for name, weight in module.named_parameters(recurse=False)
    }
    trained = [(name, owners[id(weight)]) for name, weight in local.trained]
    for chunk in local.chunks:
        # Keep a stage gathered for the whole step; otherwise every micro-batch would gather it again.
        for layer in chunk.decoder.layers:
            if not isinstance(layer, Absent):
                fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(chunk, mesh=mesh, reshard_after_forward=False)
    return [(name, getattr(module, attribute)) for name, (module, attribute) in trained]
