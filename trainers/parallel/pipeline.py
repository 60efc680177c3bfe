"""Pipeline parallelism: each rank has some of the layers, and the micro-batches of a step flow through them.

The schedules are torch's. Every rank of a pipeline makes the same micro-batches from the plan, so that only hidden
states and their gradients travel. They travel flattened, in buffers with room for the largest micro-batch so far, and
each stage cuts its micro-batch out of them: whatever the widths, it computes the shapes that one process computes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup, pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage

from trainers.config.options import TrainConfig
from trainers.data.batches import MicroBatch
from trainers.data.layout import use_documents
from trainers.parallel.norm import global_norm
from trainers.parallel.optimizer import build_optimizer, empty_state, parameter_groups, put_back, state_vectors
from trainers.parallel.pipeline_split import Absent, Chunk, Part, PipelineStages, Work, cut, refuse_tied_shards
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
        found, self.passed = self.passed, 0.0
        self.events.clear()
        return found


class Stage(PipelineStage):
    """torch's stage, which takes up the documents of a micro-batch before it computes on it, and times itself."""

    submod: Chunk
    busy: Busy

    def forward_one_chunk(self, fwd_chunk_id: int, *rest: Any, **more: Any) -> Any:
        """See torch."""
        self.submod.take_up(fwd_chunk_id, "forward")
        with self.busy.computing():
            return super().forward_one_chunk(fwd_chunk_id, *rest, **more)

    def backward_one_chunk(self, bwd_chunk_id: int, *rest: Any, **more: Any) -> Any:
        """See torch."""
        self.submod.take_up(bwd_chunk_id, "backward")
        with self.busy.computing():
            return super().backward_one_chunk(bwd_chunk_id, *rest, **more)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *rest: Any, **more: Any) -> Any:
        """See torch."""
        self.submod.take_up(bwd_chunk_id, "backward")
        with self.busy.computing():
            return super().backward_weight_one_chunk(bwd_chunk_id, *rest, **more)


class Pipelined:
    """A `Backend`, whose steps are whole: `run` takes all micro-batches of one.

    Args:
        loss: the `SupervisedLoss` on the CPU, with its weights, cut by tensor parallelism or not; it is cut in place.
        device: of this rank.
        group: the ranks of this pipeline, first stage first.
        schedule: one of `SCHEDULES`.
        replicas: the ranks with the same stages, over which gradients are averaged; None without.
        shards: the mesh over which FSDP 2 cuts the stages and averages their gradients, `[shard]` or
            `[replicate, shard]`; None without. It goes in place of `replicas`.

    Raises:
        ConfigError: when the model cannot be cut so.
    """

    def __init__(
        self,
        loss: Any,
        config: TrainConfig,
        device: torch.device,
        group: ProcessGroup,
        schedule: str = "1f1b",
        replicas: ProcessGroup | None = None,
        shards: DeviceMesh | None = None,
    ):
        self.device, self.group, self.schedule, self.replicas = device, group, schedule, replicas
        self.ranks, self.rank = distributed.get_world_size(group), distributed.get_rank(group)
        self.tensor = loss.tensor  # what tensor parallelism left this rank
        self.work, self.busy = Work(), Busy(device)
        if shards is not None:
            refuse_tied_shards(loss, schedule)
        self.part: Part = cut(loss, schedule, self.ranks, self.rank, self.work)
        gc.collect()  # the layers of other ranks are in cycles
        self.trained, self.shapes, self.tied = self.part.trained, self.part.shapes, self.part.tied
        self.total = self.ranks * len(self.part.chunks)
        self.model: nn.Module = PipelineStages(loss, self.part.chunks, self.part.hidden_size, self.part.dtype).to(
            device
        )
        self.dtype = self._carried_dtype()
        self.mesh = shards
        if shards is not None:
            self.trained = _shard_stages(self.part, shards)
        # Counted before any forward pass: after one FSDP may leave weights whole.
        self.here = sum(local_part(weight).numel() for weight in self.model.parameters())
        self.optimizer: Any = build_optimizer(parameter_groups(self.trained, self.shapes, config), config)
        self.last_rank = rank_of(schedule, self.ranks, self.total - 1)
        self.primary = replicas is None or distributed.get_rank(replicas) == 0
        if shards is not None:
            self.primary = shards.ndim == 1 or shards.get_local_rank(0) == 0
        self._schedule: Any = None
        self._made = (0, 0)

    @classmethod
    def on(cls, mesh: Mesh, loss: Any, config: TrainConfig, device: torch.device, schedule: str) -> Pipelined:
        """The pipeline of this rank in a mesh: FSDP 2 where it has `dp_shard`, else gradients averaged after the step.

        Args:
            mesh: with `pp` of more than 1.
            loss, config, device, schedule: as above; `loss` is cut by tensor parallelism already, where there is any.

        Raises:
            ConfigError: as above.
        """
        group, shards = mesh.group("pp"), None
        assert group is not None
        assert mesh.device_mesh is not None
        if mesh.sizes.dp_shard > 1:
            names = ("dp_replicate", "dp_shard_cp") if mesh.sizes.dp_replicate > 1 else ("dp_shard_cp",)
            shards = mesh.device_mesh[names]
        replicas = mesh.group("averaged") if shards is None else None
        return cls(loss, config, device, group, schedule, replicas, shards)

    @torch.no_grad()
    def _carried_dtype(self) -> torch.dtype:
        """Dtype of the hidden states between stages: what a stage makes of the embedding's. Collective."""
        use_documents(None)
        chunk = self.part.chunks[0]
        place = torch.arange(2, device=self.device)[None]
        start = (
            place if chunk.first else torch.zeros(1, 2, self.part.hidden_size, device=self.device).to(self.part.dtype)
        )
        half = chunk.compute != torch.float32
        with torch.autocast(self.device.type, chunk.compute, enabled=half, cache_enabled=False):
            mine = chunk.run(start, place).dtype
        found: list[Any] = [None] * self.ranks
        distributed.all_gather_object(found, mine, group=self.group)
        return found[0]

    def run(
        self,
        micros: Sequence[MicroBatch],
        shares: Sequence[float],
        beat: Callable[[str], None] = lambda section: None,
    ) -> torch.Tensor:
        """Forward and backward of one step; the gradients are those of the average over `replicas`. Collective.

        Args:
            micros: the micro-batches of the step, the same on every rank of the pipeline.
            shares: what each one's summed loss is multiplied with.
            beat: told `forward`, `backward` and `all-reduce` as they begin, for the heartbeat.

        Returns:
            The summed loss (fp32 scalar), not multiplied, alike on every rank of the pipeline.

        Raises:
            TrainingError: when the schedule cannot take so many micro-batches.
        """
        self._make_room(len(micros), max(micro.input_ids.numel() for micro in micros))
        self.work.beat = beat
        self.work.take([micro.inputs(self.device) for micro in micros], shares, self.device)
        numbers = torch.arange(len(micros), device=self.device)
        self._schedule.step(numbers, target=numbers, losses=[], return_outputs=False)
        self.work.micros = []
        beat("all-reduce")
        self._average()
        self._sum_tied()
        distributed.all_reduce(self.work.loss, group=self.group)  # the other ranks have 0
        return self.work.loss

    def _make_room(self, count: int, slots: int) -> None:
        """Stages and schedule for a number of micro-batches, with buffers that only ever grow."""
        self.work.room = max(slots, self.work.room)
        if self._made == (count, self.work.room):
            return
        if mistake := micro_batch_mistake(self.schedule, self.ranks, count):
            raise TrainingError(mistake)
        self._schedule = None  # its buffers go first
        shape = (self.work.room, self.part.hidden_size)
        carried = torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)
        number = torch.empty(1, dtype=torch.long, device="meta")
        score = torch.empty(1, device="meta", requires_grad=True)
        stages = [
            Stage(
                chunk, stage, self.total, self.device, group=self.group,
                input_args=(number if stage == 0 else carried,),
                output_args=(score if stage == self.total - 1 else carried,),
            )
            for stage, chunk in zip(self.part.stages, self.part.chunks, strict=True)
        ]  # fmt: skip
        for stage in stages:
            stage.busy = self.busy
        kind = getattr(pipelining, SCHEDULES[self.schedule].name)
        # Every share is given; nothing is divided by the number of micro-batches.
        settings: dict[str, Any] = {"loss_fn": lambda score, number: score, "scale_grads": False}
        self._schedule = kind(stages if SCHEDULES[self.schedule].chunks > 1 else stages[0], count, **settings)
        self._made = (count, self.work.room)

    @torch.no_grad()
    def evaluate(
        self, micros: Iterable[MicroBatch], beat: Callable[[str], None] = lambda section: None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed loss (fp64 scalar) and tokens predicted right (fp64 scalar), alike on every rank of it. Collective.

        Each micro-batch goes through all stages before a rank takes the next; with one stage per rank, the ranks work
        at different ones meanwhile.
        """
        sums, sent = torch.zeros(2, dtype=torch.float64, device=self.device), list[Any]()
        for micro in micros:
            beat("evaluation")
            self.work.room = max(self.work.room, micro.input_ids.numel())
            self.work.take([micro.inputs(self.device)], [1.0], self.device)
            carried = torch.zeros(1, device=self.device)
            for stage, chunk in zip(self.part.stages, self.part.chunks, strict=True):
                if stage > 0 and not self._here(stage - 1):
                    carried = torch.empty(self.work.room, self.part.hidden_size, dtype=self.dtype, device=self.device)
                    distributed.recv(carried, group=self.group, group_src=self._rank_of(stage - 1))
                chunk.take_up(0, "evaluation")
                carried = chunk(carried)
                if stage < self.total - 1 and not self._here(stage + 1):
                    work = distributed.isend(carried, group=self.group, group_dst=self._rank_of(stage + 1))
                    sent.append((work, carried))
            sums += torch.stack([self.work.loss.double(), self.work.correct.double()])
            while len(sent) > self.ranks:
                sent.pop(0)[0].wait()
        for work, _ in sent:
            work.wait()
        for part in self.model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        distributed.all_reduce(sums, group=self.group)
        return sums[0], sums[1]

    def _rank_of(self, stage: int) -> int:
        return rank_of(self.schedule, self.ranks, stage)

    def _here(self, stage: int) -> bool:
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
            fits = gradient is not None and sum(one.numel() for one in [*bucket, gradient]) <= BUCKET
            if bucket and (not fits or gradient is None or gradient.dtype != bucket[0].dtype):
                flat = torch.cat([one.reshape(-1) for one in bucket])
                distributed.all_reduce(flat, group=self.replicas)
                parts = flat.div_(count).split([one.numel() for one in bucket])
                for one, part in zip(bucket, parts, strict=True):
                    one.copy_(part.view_as(one))
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
        whole = dict(self.trained)[self.tied].grad
        assert whole is not None
        mine = local_part(whole)
        other, peer = torch.empty_like(mine), (ends - {self.rank}).pop()
        works = distributed.batch_isend_irecv([
            distributed.P2POp(distributed.isend, mine, group=self.group, group_peer=peer),
            distributed.P2POp(distributed.irecv, other, group=self.group, group_peer=peer),
        ])  # fmt: skip
        for work in works:
            work.wait()
        mine += other

    def _owns(self, name: str) -> bool:
        """Whether a weight held here counts here: a tied one does on the first rank."""
        return name != self.tied or self.rank == 0

    def clip(self, limit: float) -> torch.Tensor:
        """See `Backend`; over all ranks of the pipeline."""
        cuts, group = (self.tensor.cuts, self.tensor.group) if self.tensor else ({}, None)
        counted = [(name, one.grad) for name, one in self.trained if one.grad is not None and self._owns(name)]
        squared = global_norm(counted, cuts, group).double() ** 2
        distributed.all_reduce(squared, group=self.group)
        total = squared.sqrt().float()
        factor = (limit / (total + 1e-6)).clamp(max=1.0)  # as torch's own does, without asking the device
        for gradient in self._gradients():
            local_part(gradient).mul_(factor)
        return total

    def idle(self, seconds: float) -> float:
        """The share of some training time in which the ranks of this pipeline waited, of those that it had. Collective.

        Args:
            seconds: since it was last asked.
        """
        busy: list[Any] = [None] * self.ranks
        distributed.all_gather_object(busy, self.busy.seconds(), group=self.group)
        return measured_bubble(busy, seconds)

    def step(self) -> None:
        """See `Backend`."""
        self.optimizer.step()
        self.drop()

    def drop(self) -> None:
        """See `Backend`."""
        self.optimizer.zero_grad(set_to_none=True)

    def held(self) -> tuple[int, int, int]:
        """See `Backend`; of the stages here, whose sizes differ, and frozen weights too."""
        cuts = 1 if self.mesh is None else self.mesh.size(self.mesh.ndim - 1)
        return self.here, self.part.whole, cuts * (self.tensor.size if self.tensor else 1)

    def shards(self) -> list[Shard]:
        """See `Backend`; of a weight on another rank, none of its elements."""
        here = dict(self.trained)
        return [self._shard(name, here.get(name)) for name in self.shapes]

    def _shard(self, name: str, weight: nn.Parameter | None) -> Shard:
        if weight is None:
            nothing = torch.empty(0, dtype=self.part.dtypes[name], device=self.device)
            return Shard(name, self.shapes[name], 0, {WEIGHT: nothing})
        state = self.optimizer.state.get(weight, {})
        step = float(state["step"]) if "step" in state else None
        held = {WEIGHT: local_part(weight).reshape(-1), **state_vectors(state)}
        cut = self.tensor.cuts.get(name) if self.tensor else None
        primary = (
            self.primary and self._owns(name) and (cut is not None or self.tensor is None or self.tensor.rank == 0)
        )
        box = cut.box if cut is not None else ()
        return Shard(name, self.shapes[name], self._start(weight), held, step, primary, box)

    def _start(self, weight: nn.Parameter) -> int:
        """Index of this rank's first element: FSDP 2 cuts weights into runs of whole rows."""
        if self.mesh is None:
            return 0
        rows, place = weight.shape[0], self.mesh.get_local_rank(self.mesh.ndim - 1)
        each = -(-rows // self.mesh.size(self.mesh.ndim - 1))
        return min(place * each, rows) * (weight.numel() // rows)

    def put_back(self, shards: list[Shard]) -> None:
        """See `Backend`."""
        here = dict(self.trained)
        for shard in shards:
            if shard.name in here:
                put_back(self.optimizer.state.get(here[shard.name], {}), shard.tensors)

    def make_state(self, keys: Iterable[str], steps: dict[str, float]) -> None:
        """See `Backend`."""
        for name, weight in self.trained:
            if name in steps:
                self.optimizer.state[weight] = empty_state(self.optimizer, weight, keys, steps[name])


def _shard_stages(part: Part, mesh: DeviceMesh) -> list[tuple[str, nn.Parameter]]:
    """Cuts the weights of each layer, and of what is beside the layers, over a mesh; returns the trained ones anew."""
    places = {
        id(weight): (module, name)
        for chunk in part.chunks
        for module in chunk.modules()
        for name, weight in module.named_parameters(recurse=False)
    }
    before = [(name, places[id(weight)]) for name, weight in part.trained]
    for chunk in part.chunks:
        # A stage is whole from its first micro-batch to its last: each would gather it again.
        for layer in chunk.decoder.layers:
            if not isinstance(layer, Absent):
                fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(chunk, mesh=mesh, reshard_after_forward=False)
    return [(name, getattr(module, attribute)) for name, (module, attribute) in before]
