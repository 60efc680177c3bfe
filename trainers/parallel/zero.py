"""DeepSpeed ZeRO 1, 2 and 3, with its offload, over all ranks or over those with one part of the weights.

The engine keeps the parameters in fp32 and gets its compute dtype from autocast, as every other strategy does. It
takes the norm, clips and updates in one call, `step`, so the norm is handed in, and with it whether to update.
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
from torch import distributed

from trainers.config.options import TrainConfig
from trainers.parallel.backend import Backend, total_numel, trained_weights
from trainers.parallel.optimizer import build_optimizer, parameter_groups
from trainers.parallel.ranks import Ranks
from trainers.parallel.shards import WEIGHT, Shard
from trainers.run.errors import TrainingError
from trainers.strategy.deepspeed_rules import drop_without_effect
from trainers.strategy.mesh import Mesh

ASYNC_IO = "AsyncIOBuilder"


class Zero(Backend):
    """`zero1`, `zero2`, `zero3` and their offload.

    Args:
        loss: the module that computes the loss; its `.model` is the transformers or peft model.
        accelerator: wraps it as its Accelerate file says.
        ranks: all processes of the run.
        mesh: of all of them.
    """

    def __init__(self, loss: Any, config: TrainConfig, accelerator: Any, ranks: Ranks, mesh: Mesh):
        self.ranks, self.device, self.trained = ranks, ranks.device, trained_weights(loss.model)
        self.shapes = {name: weight.shape for name, weight in self.trained}
        self.tensor = getattr(loss, "tensor", None)
        self.primary = True
        self.total_numel = total_numel(loss.model, self.tensor)
        groups = TensorGroups(mesh) if self.tensor else None
        self.shard_index = groups.get_data_parallel_rank() if groups else ranks.rank
        settings = accelerator.deepspeed_plugin.deepspeed_config
        hidden = int(loss.base.config.get_text_config().hidden_size)
        self.grad_group_size = mesh.sizes.grad_group_size
        _fill(settings, config, self.grad_group_size, hidden)
        self.stage = int(settings["zero_optimization"]["stage"])
        by_decay = parameter_groups(self.trained, self.shapes, config)
        if "optimizer" in settings:
            from accelerate.utils import DummyOptim

            optimizer: Any = DummyOptim(by_decay, lr=config.scaled_learning_rate(), weight_decay=config.weight_decay)
        else:
            optimizer = build_optimizer(by_decay, config)
        build_extensions(_builders(settings))
        self.swap_lock = _own_swap_folder(settings)
        if ranks.is_main:  # the one that writes it
            _use_new_profile_file(settings)
        weight: Any
        for name, weight in self.trained:
            weight.model_parallel = self.tensor is not None and name in self.tensor.slices  # counted on every rank
        with _initialized_over(groups):
            self.model, _ = accelerator.prepare(loss, optimizer)
        self.optimizer = self.model.optimizer
        self._check_layout()

    def _check_layout(self) -> None:
        """Each fp32 span equals its part of the working weight: DeepSpeed's own account of its layout is not enough.

        Raises:
            TrainingError: on every rank, naming a weight; its checkpoints would be scrambled.
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
        """See `Backend`; all weights under ZeRO 3; the optimizer's of what tensor parallelism left under 1 and 2."""
        if self.stage == 3:
            weights: list[Any] = list(self.model.module.parameters())
            return sum(weight.ds_tensor.numel() for weight in weights), self.total_numel, self.ranks.world
        left = sum(shape.numel() for shape in self.shapes.values())
        return sum(shard.elements for shard in self.shards()), left, self.grad_group_size

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Tells the engine where a step ends; its own count of micro-batches is left at one."""
        self.model.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """See `Backend`."""
        self.model.backward(loss, scale_wrt_gas=False)

    def clip_grad_norm(self, limit: float) -> torch.Tensor:
        """See `Backend`; DeepSpeed clips in its own step, to the limit in its settings."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        optimizer = self.optimizer
        if self.stage == 3:
            self.norms = optimizer._get_norm_groups()  # -1 for one that is not finite
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
        """See `Backend`; DeepSpeed drops the gradients by itself when their norm is not finite."""
        self._engine_step([math.inf])

    def _engine_step(self, norms: list[Any]) -> None:
        """DeepSpeed's step, which would compute the norm once more, and update or not as it finds it: it gets ours."""
        name, norm = ("_get_norm_groups", norms) if self.stage == 3 else ("scaled_global_norm", norms[0])
        setattr(self.optimizer, name, lambda: norm)
        self.model.step()
        delattr(self.optimizer, name)

    def shards(self) -> list[Shard]:
        """See `Backend`; copies, where the optimizer's state rests on NVMe."""
        if not self.on_disk():
            return [self._weight_shard(name, weight) for name, weight in self.trained]
        # A sub-group's flat tensors are empty while it rests on NVMe: its shards are copied while it is in memory.
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
        """The sub-groups of weights whose optimizer state rests on NVMe; their flat tensors are empty meanwhile."""
        if self.stage != 3:
            return []
        groups = range(len(self.optimizer.fp32_partitioned_groups_flat))
        return [number for number in groups if self.optimizer._swappable_optimizer_subgroup(number)]

    @contextmanager
    def _in_memory(self, number: int, keep: bool) -> Iterator[torch.Tensor]:
        """A sub-group read from NVMe into its flat tensor; `keep` writes it back."""
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
        """ZeRO 3: a weight's sub-group, its first element in that group's flat tensor, its elements with padding."""
        position: tuple[int, int, int] = self.optimizer.grad_position[self.optimizer.get_param_id(weight)]
        return position

    def _weight_shard(self, name: str, weight: Any) -> Shard:
        optimizer = self.optimizer
        if self.stage == 3:  # an equal span on every rank, the last ones padded
            group, offset, padded = self._position(weight)
            start = min(self.shard_index * padded, self.shapes[name].numel())
            count = min(padded, self.shapes[name].numel() - start)
            return self._flat_shard(name, optimizer.fp32_partitioned_groups_flat[group], offset, count, start)
        # 1 and 2: the fragment of the weight in this rank's flat fp32 partition, if any
        mapping = weight._hp_mapping
        if mapping is None:
            return self._shard(name, 0, {WEIGHT: torch.empty(0)}, None)
        in_weight, in_flat = mapping.lp_fragment_address, mapping.hp_fragment_address
        flat = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        return self._flat_shard(name, flat, in_flat.start, in_weight.numel, in_weight.start)

    def _flat_shard(self, name: str, flat: torch.Tensor, offset: int, count: int, start: int) -> Shard:
        """What lies at `offset` of a flat tensor and its optimizer state: of a weight, from its element `start` on."""
        state = self.optimizer.optimizer.state.get(flat, {})
        tensors = {
            key: value.reshape(-1).narrow(0, offset, count)
            for key, value in state.items()
            if torch.is_tensor(value) and value.numel() == flat.numel() > 1
        }
        step = float(state["step"]) if "step" in state else None
        weight = flat.detach().reshape(-1).narrow(0, offset, count)
        return self._shard(name, start, {WEIGHT: weight, **tensors}, step)

    def init_optimizer_state(self, keys: Sequence[str], steps: dict[str, float]) -> None:
        """See `Backend`; a flat partition has one count of updates for all weights in it."""
        inner = self.optimizer.optimizer
        plain_count = type(inner).__module__.startswith("deepspeed")  # they count in plain integers
        updates = max(steps.values())
        flats = "fp32_partitioned_groups_flat" if self.stage == 3 else "single_partition_of_fp32_groups"
        for number, flat in enumerate(getattr(self.optimizer, flats)):
            with self._in_memory(number, keep=True) if number in self.on_disk() else nullcontext():
                step = int(updates) if plain_count else torch.tensor(updates, dtype=torch.float32, device=flat.device)
                zeros = {key: torch.zeros_like(flat, requires_grad=False) for key in keys}
                inner.state[flat] = {"step": step, **zeros}


class TensorGroups:
    """The groups of a tensor-parallel model, by the names under which DeepSpeed asks for them (Megatron's `mpu`).

    Args:
        mesh: of all ranks.
    """

    def __init__(self, mesh: Mesh):
        self.tensor, self.data = mesh.group("tp"), mesh.group("grad_group")

    def get_model_parallel_group(self) -> Any:
        """The ranks that share each weight that is split."""
        return self.tensor

    def get_model_parallel_rank(self) -> int:
        """This rank's index among them."""
        return distributed.get_rank(self.tensor)

    def get_model_parallel_world_size(self) -> int:
        """How many they are."""
        return distributed.get_world_size(self.tensor)

    def get_data_parallel_group(self) -> Any:
        """The ranks with the same part of the weights, over which gradients are averaged and ZeRO shards."""
        return self.data

    def get_data_parallel_rank(self) -> int:
        """This rank's index among them."""
        return distributed.get_rank(self.data)

    def get_data_parallel_world_size(self) -> int:
        """How many they are."""
        return distributed.get_world_size(self.data)

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Their numbers in the run."""
        return distributed.get_process_group_ranks(self.data)


@contextmanager
def _initialized_over(groups: TensorGroups | None) -> Iterator[None]:
    """Within it DeepSpeed is started with these groups, for which Accelerate has no word; None: over all ranks."""
    import deepspeed

    plain = deepspeed.initialize
    if groups is not None:
        deepspeed.initialize = functools.partial(plain, mpu=groups)
    try:
        yield
    finally:
        deepspeed.initialize = plain


def _fill(settings: dict[str, Any], config: TrainConfig, world: int, hidden: int) -> None:
    """Sets what the config decides, and every "auto".

    Args:
        world: ranks over which gradients are averaged.
    """
    micro = config.per_device_train_batch_size
    settings.update(
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=1,  # the script says where a step ends
        train_batch_size=micro * world,
        gradient_clipping=config.max_grad_norm,
        zero_allow_untested_optimizer=True,
        steps_per_print=2**31,
    )
    for name in ("bf16", "fp16"):
        settings[name] = {"enabled": False}
    drop_without_effect(settings)
    zero = settings["zero_optimization"]
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
    """DeepSpeed's builders of the Adam that it will use (none for torch's), and of what reaches NVMe."""
    device, optimizer = _optimizer_device(settings), settings.get("optimizer", {})
    own = str(optimizer.get("type", "none")).lower() in ("adam", "adamw") and not optimizer["params"].get("torch_adam")
    if device == "nvme":
        return ["CPUAdamBuilder", ASYNC_IO]
    return ["CPUAdamBuilder"] if device == "cpu" else ["FusedAdamBuilder"] if own else []


def _own_swap_folder(settings: dict[str, Any]) -> FileLock | None:
    """Gives this process a folder of its own under `nvme_path`, empty, and removed at its end.

    DeepSpeed names its files by rank alone: two runs with one `nvme_path` would train on each other's weights, and
    what it wrote would stay. What a killed process left is known by its lock, which nobody holds.

    Returns:
        the lock, to be kept as long as the folder is used; None when nothing rests on NVMe.

    Raises:
        TrainingError: when `nvme_path` cannot be made.
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
                continue  # a folder of the user's
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
    """Lets DeepSpeed's FLOPs profiler, which truncates its `output_file`, write to one that was not there before.

    Raises:
        TrainingError: when it cannot be made.
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
    """Where compiled extensions lie: each Python environment has its own, as two would undo each other's builds."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tunesmith" / "torch_extensions"
    return cache / hashlib.sha256(f"{sys.prefix} {torch.__version__}".encode()).hexdigest()[:12]


def build_extensions(builders: list[str]) -> None:
    """Compiles what DeepSpeed will load, in a folder of our own, one rank and one run at a time, and says so.

    torch's builder waits for ever on the lock file of a build that was killed; under our lock such a file is stale.
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
