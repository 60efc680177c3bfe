"""DeepSpeed ZeRO 1, 2 and 3 (https://arxiv.org/abs/1910.02054) with offload, alone or under tensor parallelism.

The engine keeps parameters in fp32; autocast sets the compute dtype, as under every other strategy. Its `step` computes
the norm, clips and updates in one call, so it is given a norm that was computed before: an infinite one skips the
update.
"""

from __future__ import annotations

import atexit
import errno
import functools
import hashlib
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from trainers.config.options import TrainConfig
from trainers.model.casts import cast_before_gather
from trainers.parallel.backend import Backend, total_numel, trained_weights
from trainers.parallel.fill import fill, shard_as_read, unread
from trainers.parallel.optimizer import build_optimizer, parameter_groups, update_count
from trainers.parallel.ranks import Ranks
from trainers.parallel.shards import WEIGHT, Shard
from trainers.parallel.tensor_groups import TensorGroups
from trainers.run.errors import TrainingError
from trainers.run.folder import cache_folder
from trainers.strategy.deepspeed_rules import drop_without_effect
from trainers.strategy.mesh import Mesh

ASYNC_IO = "AsyncIOBuilder"


class Zero(Backend):
    """`zero1`, `zero2`, `zero3` and their offload.

    Args:
        loss: the module that computes the loss; its `.model` is the transformers or peft model.
        config: the run's config.
        accelerator: wraps `loss` as its Accelerate file specifies.
        ranks: all processes of the run.
        mesh: the mesh of all ranks.

    Raises:
        TrainingError: if DeepSpeed's account of its memory layout is wrong, or NVMe cannot be used for offload.
    """

    def __init__(self, loss: Any, config: TrainConfig, accelerator: Any, ranks: Ranks, mesh: Mesh):
        self.ranks, self.device, self.trained = ranks, ranks.device, trained_weights(loss.model)
        self.shapes = {name: weight.shape for name, weight in self.trained}
        self.tensor = getattr(loss, "tensor", None)
        self.primary = True
        self.total_numel = total_numel(loss, self.tensor)
        groups = TensorGroups(mesh) if self.tensor else None
        self.shard_index = groups.get_data_parallel_rank() if groups else ranks.rank
        settings = accelerator.deepspeed_plugin.deepspeed_config
        hidden = int(loss.base.config.get_text_config().hidden_size)
        self.grad_group_size = mesh.sizes.grad_group_size
        _fill(settings, config, self.grad_group_size, hidden)
        self.stage = int(settings["zero_optimization"]["stage"])
        by_decay = parameter_groups(self.trained, self.shapes, config)
        # If its file configures an optimizer, DeepSpeed builds it itself; Accelerate requires a placeholder then.
        if "optimizer" in settings:
            from accelerate.utils import DummyOptim

            optimizer: Any = DummyOptim(by_decay, lr=config.scaled_learning_rate(), weight_decay=config.weight_decay)
        else:
            optimizer = build_optimizer(by_decay, config)
        self.counts_communication = bool((settings.get("comms_logger") or {}).get("enabled"))
        build_extensions(_builders(settings))
        self.swap_lock = _own_swap_folder(settings)
        if ranks.is_main:  # which writes the file
            _use_new_profile_file(settings)
        weight: Any
        for name, weight in self.trained:
            # DeepSpeed's norm counts slices on every tensor-parallel rank, replicated weights on the first only.
            weight.model_parallel = self.tensor is not None and name in self.tensor.slices
        if self.stage == 3:
            _gather_as_cast(loss, cast_before_gather(config, loss))
        if self.stage < 3:
            fill(loss, self.device)
        elif unread(loss):
            shard_as_read(loss, settings, self.device, groups, first=self.shard_index == 0)
        if self.stage == 3 and config.lora_target_parameters:
            # DeepSpeed empties adapters of stacks before their gradients arrive if the input of their layer needs none.
            loss.base.enable_input_require_grads()
        with _initialized_over(groups):
            self.model, _ = accelerator.prepare(loss, optimizer)
        self.optimizer = self.model.optimizer
        groups_of = self.optimizer.bit16_groups if self.stage < 3 else []
        self.group_numbers = {id(weight): number for number, group in enumerate(groups_of) for weight in group}
        self._check_layout()

    def _check_layout(self) -> None:
        """Checks that each fp32 span equals its part of the model's weight, rather than trusting DeepSpeed's offsets.

        Raises:
            TrainingError: on every rank, naming a weight that differs; checkpoints would be scrambled.
        """
        wrong, weights = "", dict[str, Any](self.trained)
        for shard in self.shards():
            weight = weights[name := shard.name]
            work = weight.ds_tensor if self.stage == 3 else weight.detach().reshape(-1)[shard.start :]
            if not torch.equal(shard.tensors[WEIGHT].cpu(), work[: shard.elements].float().cpu()):
                wrong = name
        problem = TrainingError(f"{wrong} is not where DeepSpeed says; change its settings") if wrong else None
        self.ranks.agree(problem, "checking the layout of the weights")

    def local_and_total_numel(self) -> tuple[int, int, int]:
        """See `Backend`; all weights under ZeRO 3, otherwise the optimizer's share of the (tensor-parallel) weights."""
        if self.stage == 3:
            weights: list[Any] = list(self.model.module.parameters())
            return sum(weight.ds_tensor.numel() for weight in weights), self.total_numel, self.ranks.world
        left = sum(shape.numel() for shape in self.shapes.values())
        return sum(shard.elements for shard in self.shards()), left, self.grad_group_size

    def finish(self) -> None:
        """See `Backend`; prints the sizes, times and bandwidths that `comms_logger` has counted, if it is on."""
        if self.counts_communication:
            from deepspeed import comm

            comm.log_summary()

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """See `Backend`; marks the step boundary explicitly, as the engine is configured without accumulation."""
        self.model.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """See `Backend`."""
        self.model.backward(loss, scale_wrt_gas=False)

    def clip_grad_norm(self, limit: float) -> torch.Tensor:
        """See `Backend`; DeepSpeed clips later, in its own step, to the limit in its settings."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        optimizer = self.optimizer
        if self.stage == 3:
            self.norms = optimizer._get_norm_groups()  # -1 for a non-finite norm
            norm = combine_grad_norm_groups(self.norms)
        else:
            optimizer._wait_for_offload_copies()
            norm = optimizer.scaled_global_norm()
            self.norms = [norm]
        return norm.to(self.device, torch.float32)

    def step(self) -> None:
        """See `Backend`."""
        self._engine_step(self.norms)

    def skip_step(self) -> None:
        """See `Backend`; DeepSpeed discards the gradients if their norm is not finite."""
        self._engine_step([math.inf])

    def _engine_step(self, norms: list[Any]) -> None:
        """Runs DeepSpeed's step with given norms; it would otherwise recompute them and decide itself to update."""
        name, norm = ("_get_norm_groups", norms) if self.stage == 3 else ("scaled_global_norm", norms[0])
        setattr(self.optimizer, name, lambda: norm)
        self.model.step()
        delattr(self.optimizer, name)

    def shards(self) -> list[Shard]:
        """See `Backend`; shards are copies if the optimizer state is on NVMe."""
        if not self.on_disk():
            return [self._weight_shard(name, weight) for name, weight in self.trained]
        # The flat tensors of a sub-group are empty while it is on NVMe: swap each in and copy its shards.
        copies: dict[str, Shard] = {}
        for number in self.on_disk():
            with self._in_memory(number, keep=False):
                copies |= {name: self._weight_shard(name, weight).copied() for name, weight in self._trained_in(number)}
        return [copies.get(name) or self._weight_shard(name, weight) for name, weight in self.trained]

    def write_shards(self, shards: list[Shard]) -> None:
        """See `Backend`."""
        written = {shard.name: shard for shard in shards}
        for number in self.on_disk():
            with self._in_memory(number, keep=True):
                for name, weight in self._trained_in(number):
                    self._weight_shard(name, weight).take(written[name])

    def on_disk(self) -> list[int]:
        """The sub-groups of weights whose optimizer state is on NVMe; their flat tensors are empty when swapped out."""
        if self.stage != 3:
            return []
        groups = range(len(self.optimizer.fp32_partitioned_groups_flat))
        return [number for number in groups if self.optimizer._swappable_optimizer_subgroup(number)]

    @contextmanager
    def _in_memory(self, number: int, keep: bool) -> Iterator[torch.Tensor]:
        """Swaps a sub-group in from NVMe and yields its flat fp32 tensor.

        Args:
            number: index of the sub-group.
            keep: write changes back to NVMe.
        """
        optimizer = self.optimizer
        flat = optimizer.fp32_partitioned_groups_flat[number]
        optimizer.optimizer_swapper.swap_in_optimizer_state(flat)
        try:
            yield flat
        finally:
            flat.grad = None
            optimizer.optimizer_swapper.writeback_optimizer_state_and_gradients(flat, keep, False)

    def _trained_in(self, number: int) -> list[tuple[str, Any]]:
        return [(name, weight) for name, weight in self.trained if self._position(weight)[0] == number]

    def _position(self, weight: Any) -> tuple[int, int, int]:
        """ZeRO 3: sub-group of a weight, its offset in the group's flat tensor, and its local elements with padding."""
        position: tuple[int, int, int] = self.optimizer.grad_position[self.optimizer.get_param_id(weight)]
        return position

    def _weight_shard(self, name: str, weight: Any) -> Shard:
        optimizer = self.optimizer
        if self.stage == 3:  # an equal span on every rank, the last ones padded
            group, offset, padded = self._position(weight)
            start = min(self.shard_index * padded, self.shapes[name].numel())
            count = min(padded, self.shapes[name].numel() - start)
            return self._flat_shard(name, optimizer.fp32_partitioned_groups_flat[group], offset, count, start)
        # ZeRO 1 and 2: the fragment of the weight in this rank's flat fp32 partition, if any
        mapping = weight._hp_mapping
        if mapping is None:
            return self._shard(name, 0, {WEIGHT: torch.empty(0)}, None)
        in_weight, in_flat = mapping.lp_fragment_address, mapping.hp_fragment_address
        flat = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        return self._flat_shard(name, flat, in_flat.start, in_weight.numel, in_weight.start)

    def _flat_shard(self, name: str, flat: torch.Tensor, offset: int, count: int, start: int) -> Shard:
        """Builds a shard from views of a flat tensor and its optimizer state.

        Args:
            name: name of the weight.
            flat: the flat fp32 tensor.
            offset: index in `flat` of the first local element.
            count: number of local elements.
            start: index of the first local element in the flattened weight.
        """
        # State tensors as large as the flat tensor share its layout; anything else (the update count) is a scalar.
        state = self.optimizer.optimizer.state.get(flat, {})
        tensors = {
            key: value.reshape(-1).narrow(0, offset, count)
            for key, value in state.items()
            if torch.is_tensor(value) and value.numel() == flat.numel() > 1
        }
        step = float(state["step"]) if "step" in state else None
        weight = flat.detach().reshape(-1).narrow(0, offset, count)
        return self._shard(name, start, {WEIGHT: weight, **tensors}, step)

    def shards_of(self, names: Sequence[str], within: Sequence[torch.Tensor] | None = None) -> list[Shard]:
        """See `Backend`; DeepSpeed updates one flat tensor after the other."""
        if within is not None:
            updated = {number for number, flat in enumerate(self._flats()) if any(flat is weight for weight in within)}
            local = dict(self.trained)
            names = [name for name in names if self._flat_number(local[name]) in updated]
        return super().shards_of(names)

    def _flats(self) -> list[torch.Tensor]:
        """This rank's flat fp32 tensors, one of each parameter group or, under ZeRO 3, of each of its sub-groups."""
        name = "fp32_partitioned_groups_flat" if self.stage == 3 else "single_partition_of_fp32_groups"
        flats: list[torch.Tensor] = getattr(self.optimizer, name)
        return flats

    def _updated(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """See `Backend`; DeepSpeed updates flat tensors."""
        for flat in self._flats():
            yield flat.detach(), self.optimizer.optimizer.state.get(flat, {})

    def _flat_number(self, weight: Any) -> int:
        """Index of the flat tensor that has a weight, on this rank or another."""
        if self.stage == 3:
            return self._position(weight)[0]
        return self.group_numbers[id(weight)]

    def init_optimizer_state(self, keys: dict[str, list[str]], steps: dict[str, float]) -> None:
        """See `Backend`; a flat partition has a single update count for all of its weights."""
        inner = self.optimizer.optimizer
        plain_count = type(inner).__module__.startswith("deepspeed")  # DeepSpeed's optimizers count in integers
        updates = max(steps.values())
        of_flat: dict[int, set[str]] = {}
        for name, weight in self.trained:
            of_flat.setdefault(self._flat_number(weight), set()).update(keys.get(name, ()))
        for number, flat in enumerate(self._flats()):
            with self._in_memory(number, keep=True) if number in self.on_disk() else nullcontext():
                step = int(updates) if plain_count else update_count(updates, of_flat[number], flat.device)
                zeros = {key: torch.zeros_like(flat, requires_grad=False) for key in sorted(of_flat[number])}
                inner.state[flat] = {"step": step, **zeros}


def _gather_as_cast(loss: Any, names: set[str]) -> None:
    """Makes DeepSpeed gather weights of these names in the compute dtype.

    It reads the attribute for gathers; for reductions too only where its own autocast is on, so those stay fp32.
    """
    from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME

    for name in names:
        setattr(loss.model.get_parameter(name), PARAM_COMM_DTYPE_ATTR_NAME, loss.compute)


@contextmanager
def _initialized_over(groups: TensorGroups | None) -> Iterator[None]:
    """Makes `deepspeed.initialize` use these groups, which Accelerate cannot pass on; None for all ranks."""
    import deepspeed

    plain = deepspeed.initialize
    if groups is not None:
        deepspeed.initialize = functools.partial(plain, mpu=groups)
    try:
        yield
    finally:
        deepspeed.initialize = plain


def _fill(settings: dict[str, Any], config: TrainConfig, world: int, hidden: int) -> None:
    """Fills DeepSpeed settings in place: those that the config determines, and every "auto".

    Args:
        settings: the DeepSpeed config.
        config: the run's config.
        world: number of ranks over which gradients are averaged.
        hidden: hidden size of the model, which bucket sizes depend on.
    """
    micro = config.per_device_train_batch_size
    settings.update(
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=1,  # `accumulate` marks where a step ends
        train_batch_size=micro * world,
        gradient_clipping=config.max_grad_norm,
        zero_allow_untested_optimizer=True,
        steps_per_print=2**31,
    )
    for name in ("bf16", "fp16"):
        settings[name] = {"enabled": False}
    drop_without_effect(settings)
    zero = settings["zero_optimization"]
    # By default, ZeRO 1 and 2 sum a bucket on all ranks, twice the bytes of a sum on the rank that has that share.
    zero.setdefault("use_multi_rank_bucket_allreduce", False)
    sizes = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    zero.update({name: size for name, size in sizes.items() if zero.get(name) == "auto"})
    auto = {
        "lr": config.scaled_learning_rate(),
        "betas": [config.adam_beta1, config.adam_beta2],
        "eps": config.adam_epsilon,
        "weight_decay": config.weight_decay,
    }
    params = settings.get("optimizer", {}).get("params", {})
    params.update({name: auto[name] for name, value in params.items() if value == "auto" and name in auto})


def _optimizer_device(settings: dict[str, Any]) -> str:
    return (settings["zero_optimization"].get("offload_optimizer") or {}).get("device", "none")


def _builders(settings: dict[str, Any]) -> list[str]:
    """Names of the DeepSpeed op builders for the Adam that it will use (none for torch's) and for NVMe access."""
    device, optimizer = _optimizer_device(settings), settings.get("optimizer", {})
    own = str(optimizer.get("type", "none")).lower() in ("adam", "adamw") and not optimizer["params"].get("torch_adam")
    if device == "nvme":
        return ["CPUAdamBuilder", ASYNC_IO]
    return ["CPUAdamBuilder"] if device == "cpu" else ["FusedAdamBuilder"] if own else []


def _own_swap_folder(settings: dict[str, Any]) -> FileLock | None:
    """Creates an empty folder under `nvme_path` for this process, which is removed when the process exits.

    DeepSpeed names its files by rank only and never removes them: two runs with the same `nvme_path` would train on
    each other's weights. Folders left by killed processes, recognized by their unheld locks, are removed.

    Returns:
        The folder's lock, to be held as long as the folder is in use; None without offload to NVMe.

    Raises:
        TrainingError: if `nvme_path` cannot be created.
    """
    if _optimizer_device(settings) != "nvme":
        return None
    section = settings["zero_optimization"]["offload_optimizer"]
    disk = Path(section["nvme_path"])
    try:
        disk.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"nvme_path={disk} cannot be used: {error.strerror}; name a folder on that disk") from None
    with FileLock(disk / "tunesmith.lock"):
        for old in disk.glob("tunesmith-*/"):
            if not (old / "lock").is_file():
                continue  # not one of ours
            # A lock that can be acquired was left by a killed process: its folder is garbage.
            try:
                FileLock(old / "lock").acquire(timeout=0)
            except Timeout:
                continue
            shutil.rmtree(old, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix="tunesmith-", dir=disk))
        lock = FileLock(folder / "lock")
        lock.acquire()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    section["nvme_path"] = str(folder)
    return lock


def _use_new_profile_file(settings: dict[str, Any]) -> None:
    """Gives DeepSpeed's FLOPs profiler, which truncates its `output_file`, a file that did not exist before.

    Raises:
        TrainingError: if the file cannot be created.
    """
    section = settings.get("flops_profiler") or {}
    if not section.get("enabled") or not section.get("output_file"):
        return
    wanted = Path(section["output_file"]).absolute()
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        for path in (
            wanted,
            *(wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}") for number in range(1, 1000)),
        ):
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
                break
        else:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    except OSError as error:
        raise TrainingError(
            f"flops_profiler.output_file={wanted} cannot be created: {error.strerror}; name a new file"
        ) from None
    if path != wanted:
        print(f"flops_profiler.output_file={wanted} already exists; the profile goes to {path}", flush=True)
    section["output_file"] = str(path)


def extensions_folder() -> Path:
    """Cache folder of compiled extensions, one per Python environment, as two would overwrite each other's builds."""
    environment = hashlib.sha256(f"{sys.prefix} {torch.__version__}".encode()).hexdigest()
    return cache_folder() / "torch_extensions" / environment[:12]


def build_extensions(builders: list[str]) -> None:
    """Compiles the extensions that DeepSpeed will load, one process at a time, and prints a line for each build.

    torch's builder waits forever on the lock file of a killed build; any lock file found under our own lock is stale.

    Args:
        builders: names of DeepSpeed op builders.

    Raises:
        TrainingError: if libaio, which NVMe access needs, is not installed.
    """
    folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(extensions_folder())))
    folder.mkdir(parents=True, exist_ok=True)
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops

    with FileLock(folder / "tunesmith.lock"):
        for stale in folder.glob("**/lock"):
            stale.unlink()
        for name in builders:
            builder = get_accelerator().create_op_builder(name)
            if name == ASYNC_IO and not builder.is_compatible():
                raise TrainingError("offload to NVMe needs libaio, but there is none; install libaio-dev, or use cpu")
            compiled = folder / builder.name / f"{builder.name}.so"
            if not compiled.is_file() and not installed_ops.get(builder.name):
                print(f"compiling DeepSpeed's {builder.name}, once for this installation: a minute or more", flush=True)
            builder.load(verbose=False)
