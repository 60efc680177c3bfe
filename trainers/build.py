"""Puts the parts of a run together: Accelerator, wrapped model, optimizer, checkpoints, reports."""

from __future__ import annotations

import copy
import gc
import os
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType, ParallelismConfig, set_seed
from torch.distributed import distributed_c10d
from tqdm import tqdm
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.utils import logging

from trainers.checkpoint.checkpoint import Checkpoints
from trainers.checkpoint.remote import Mirror, is_url, split_step
from trainers.config.options import ConfigError, TrainConfig
from trainers.data.prepare import TokenSet
from trainers.model.attention import KERNELS, avoid_cudnn
from trainers.model.attention_kernel import choose
from trainers.model.experts import adapter_lines
from trainers.model.fp8 import convert
from trainers.model.load import build_model, compile_blocks, compute_dtype
from trainers.model.probe import check_model_computes
from trainers.monitor.metrics import MetricsFile
from trainers.monitor.self_check import Census
from trainers.objectives.load_balancing import balancing_lines
from trainers.objectives.sft import SupervisedLoss
from trainers.parallel.backend import MicroBatched
from trainers.parallel.cpu import adapt_to_cpu
from trainers.parallel.fsdp import FullySharded
from trainers.parallel.pipeline import Pipelined
from trainers.parallel.ranks import Ranks
from trainers.parallel.replicated import Replicated
from trainers.parallel.sequence import over_ranks, refuse_unfit
from trainers.parallel.shards import check_whole
from trainers.parallel.tensor import cut
from trainers.run.compatibility import plain, versions
from trainers.run.errors import TrainingError
from trainers.run.folder import Process, RunFolder
from trainers.run.log import without_secrets
from trainers.run.manifest import Origin
from trainers.strategy.mesh import Mesh
from trainers.strategy.strategy import Strategy
from trainers.tools.preflight import check_token_ids

_HOOKS = {
    "none": DDPCommunicationHookType.NO,
    "fp16": DDPCommunicationHookType.FP16,
    "bf16": DDPCommunicationHookType.BF16,
    "power_sgd": DDPCommunicationHookType.POWER_SGD,
}
_HALF_AN_HOUR = 1800
_PROJECT = "tunesmith"
"""What trackers list the run under; TensorBoard's files go into a folder of this name in the run folder."""


def _collectives_wait(config: TrainConfig) -> timedelta:
    """How long a collective waits for the other ranks, in every group, whoever makes it.

    Longer than a hang may last, as the heartbeat names the rank that hangs and NCCL ends those that wait for it. For
    groups of device meshes and DeepSpeed it takes a default of its own, ten minutes.
    """
    timeout = timedelta(seconds=max(_HALF_AN_HOUR, config.hang_timeout) + 300)
    distributed_c10d.default_pg_nccl_timeout = timeout
    return timeout


def accelerator(config: TrainConfig, strategy: Strategy, run: RunFolder) -> tuple[Accelerator, Ranks, Mesh]:
    """The process group and the Accelerator of this run, seeded, and the mesh; as the Accelerate file has them."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    avoid_cudnn()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32
    adapt_to_cpu()
    if strategy.distributed_type == "DEEPSPEED":
        from trainers.parallel.zero import build_extensions  # DeepSpeed is an extra

        # On a CPU, DeepSpeed compiles its own all-reduce as soon as the process group is made.
        build_extensions(["ShareMemCommBuilder"] if os.environ.get("DS_ACCELERATOR") == "cpu" else [])
    os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)  # it would divide the gradients behind our back
    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)  # the mesh is ours: Accelerate's has no packed rows
    ddp = DistributedDataParallelKwargs(
        bucket_cap_mb=config.ddp_bucket_cap_mb,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        comm_hook=_HOOKS[config.ddp_comm_hook],
        # torch would compress nothing for the first 1,000 steps.
        comm_state_option={"start_powerSGD_iter": 10} if config.ddp_comm_hook == "power_sgd" else {},
    )
    timeout = _collectives_wait(config)
    made = Accelerator(
        # bf16 is applied by the loss module, alike for all; fp16 needs Accelerate's gradient scaler too.
        mixed_precision="fp16" if config.mixed_precision == "fp16" else "no",
        log_with=config.report_to or None,
        project_dir=str(run.path),
        kwargs_handlers=[ddp, InitProcessGroupKwargs(timeout=timeout)],
    )
    unset_hf_deepspeed_config()  # transformers would cut the weights while it loads them, under ZeRO 3
    set_seed(config.seed)
    ranks = Ranks(made.device)
    mesh = Mesh(strategy.sizes, ranks.rank, ranks.device.type if strategy.has_mesh else None)
    if strategy.mesh and strategy.distributed_type == "FSDP":
        made.state.device_mesh = mesh.device_mesh
        made.state.parallelism_config = ParallelismConfig(
            dp_replicate_size=mesh.sizes.dp_replicate, dp_shard_size=mesh.sizes.dp_shard * mesh.sizes.parts
        )
    if strategy.mesh and strategy.distributed_type == "MULTI_GPU":
        made.ddp_handler = _over_group(ddp, mesh.group("averaged"))
    return made, ranks, mesh


def _over_group(ddp: DistributedDataParallelKwargs, group: Any) -> Any:
    """The same settings for DDP, over some of the processes, which Accelerate has no word for."""
    given = ddp.to_kwargs() | {"process_group": group}
    narrowed = copy.copy(ddp)
    narrowed.to_kwargs = lambda: dict(given)
    return narrowed


def module(
    config: TrainConfig, main_rank: bool, splits: Sequence[TokenSet | None] = (), pad_token_id: int = 0
) -> SupervisedLoss:
    """The model and its loss on the CPU, whole, before any strategy touches it.

    Args:
        splits: the data, of whose tokens each needs an embedding; so does the token that fills rows.
    """
    if not main_rank:
        logging.disable_progress_bar()
    # Deprecations inside the libraries are not the user's to mend.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft|accelerate|torch)\.")
    model = build_model(config)
    if config.mixed_precision == "fp8":
        convert(model)
    offloads = config.gradient_checkpointing and config.activation_offloading
    loss = SupervisedLoss(model, compute_dtype(config), offloads)
    if main_rank and (lines := adapter_lines(model) + balancing_lines(loss.balancing)):
        print("\n".join(lines), flush=True)
    check_token_ids(config, splits, loss.vocab_size, pad_token_id)
    return loss


def backend(
    config: TrainConfig, strategy: Strategy, made: Accelerator, ranks: Ranks, mesh: Mesh, loss: SupervisedLoss
) -> tuple[MicroBatched | Pipelined, Census]:
    """The strategy's hold on model and optimizer, its attention proved, and the dtypes seen meanwhile."""
    refuse_unfit(loss.base.config.get_text_config(), mesh.sizes)
    precision = torch.bfloat16 if config.tf32 else loss.compute
    if mesh.sizes.pp > 1:  # later, no rank can run the model as a whole
        check_on_cpu(loss, config.packing, precision)
    if loss.base.config._attn_implementation in KERNELS.values():
        _use_kernel(config, ranks, loss)
    cut(loss, mesh.group("tp"), mesh.index("tp"), mesh.sizes.tp)
    if config.torch_compile:
        compile_blocks(loss.base)
    if mesh.sizes.pp > 1:
        wrapped: MicroBatched | Pipelined = Pipelined.on(mesh, loss, config, ranks.device, strategy.pp_schedule)
    elif strategy.distributed_type == "FSDP":
        wrapped = FullySharded(loss, config, made, ranks, mesh)
    elif strategy.distributed_type == "DEEPSPEED":
        from trainers.parallel.zero import Zero

        wrapped = Zero(loss, config, made, ranks, mesh)
    else:
        wrapped = Replicated(loss, config, made)
    if strategy.distributed_type in ("FSDP", "DEEPSPEED") or mesh.sizes.tp * mesh.sizes.pp > 1:
        check_whole(wrapped.shards(), ranks)
    with Census(loss) as census:
        # Rows are cut where all of a token's looks back go through our attention: the packed probe shows it.
        packing = config.packing or mesh.sizes.parts > 1
        check_model_computes(wrapped.model, loss.base, packing, ranks.device, precision, stock=mesh.sizes.pp == 1)
    loss.over_ranks = over_ranks(mesh)
    if isinstance(wrapped, Replicated):
        wrapped.settle()
    return wrapped, census


def check_on_cpu(loss: SupervisedLoss, packing: bool, precision: torch.dtype) -> None:
    """The probe of a model on the CPU, with plain matrix products: the kernels of GPUs do not run there.

    Raises:
        ConfigError: as `check_model_computes`.
    """
    if loss.base.config._attn_implementation in KERNELS.values():
        loss.base.set_attn_implementation(KERNELS["eager"])
    check_model_computes(loss, loss.base, packing, torch.device("cpu"), precision)


def _use_kernel(config: TrainConfig, ranks: Ranks, loss: SupervisedLoss) -> None:
    """Gives the model its attention kernel, the same on every rank. Collective."""
    kernel, error = "sdpa", None
    try:
        kernel = choose(config, loss.base.config.get_text_config(), ranks.device, loss.compute)
    except ConfigError as problem:
        error = problem
    ranks.agree(error, "choosing the attention kernel")
    alike = len(set(ranks.gather(kernel))) == 1
    loss.base.set_attn_implementation(KERNELS[kernel if alike else "sdpa"])


def checkpoints(
    config: TrainConfig, strategy: Strategy, run: RunFolder, ranks: Ranks, fingerprint: str, base: str, attempt: int
) -> Checkpoints:
    """The run's checkpoints, each of which will tell where it comes from.

    Raises:
        TrainingError: on every rank, when `checkpoint_url` cannot be used.
    """
    origin = Origin(strategy.name, plain(config), fingerprint, base, versions())
    made = Checkpoints(run.checkpoints, ranks, origin, config.save_total_limit, attempt, config.force_resume)
    error = None
    if ranks.is_main and config.checkpoint_url:
        try:
            made.mirror = Mirror(config.checkpoint_url, made.limit)
            made.mirror.check_writable()
        except TrainingError as problem:
            error = problem
    ranks.agree(error, "reaching the place of the copies")
    return made


def resume_folder(config: TrainConfig, kept: Checkpoints) -> Path | None:
    """The checkpoint to go on from, None for a start at step 0. Collective.

    Raises:
        TrainingError: on every rank, when it cannot be fetched, or a new run would mix its copies with another's.
    """
    where = config.resume_from_checkpoint
    if where is None or not _is_own(where, kept):
        _refuse_used_mirror(kept)
    if where is None:
        return None
    folder = kept.newest() if where == "auto" else _fetched(where, kept) if is_url(where) else Path(where)
    if folder is None and kept.ranks.is_main:
        print("there is no checkpoint to resume from; it starts at step 0", flush=True)
    return folder


def _is_own(where: str, kept: Checkpoints) -> bool:
    """Whether a run goes on from a checkpoint of its own, and no branch of another begins."""
    if is_url(where):
        return kept.mirror is not None and split_step(where)[0] == kept.mirror.url
    return where == "auto" or Path(where).expanduser().resolve().parent == kept.folder.resolve()


def _refuse_used_mirror(kept: Checkpoints) -> None:
    """A new run needs a place without copies: it would take them for its own. Collective."""
    error = None
    try:
        steps = kept.mirror.steps() if kept.mirror else []
        if kept.mirror and steps:
            error = TrainingError(
                f"checkpoint_url={kept.mirror.url} holds checkpoints, the newest of step {steps[0]}; go on from them "
                "with --resume_from_checkpoint auto, or use another"
            )
    except TrainingError as problem:
        error = problem
    kept.ranks.agree(error, "starting a new run")


def _fetched(url: str, kept: Checkpoints) -> Path:
    """A checkpoint brought here from `URL/step-00000010`, or the newest of a URL. Collective."""
    error, folder = None, None
    if kept.ranks.is_main:
        place, step = split_step(url)
        try:
            own = kept.mirror if kept.mirror and kept.mirror.url == place else None
            source = own or Mirror(place, kept.limit)  # its own remembers what could not be read, and keeps it
            folder = source.fetch(step, kept.folder) if step is not None else source.fetch_newer(-1, kept.folder)
            if folder is None:
                error = TrainingError(f"there is no whole checkpoint at {url}; check the URL")
        except TrainingError as problem:
            error = problem
    kept.ranks.agree(error, f"fetching {url}")
    return Path(kept.ranks.broadcast(str(folder)))


def metrics_file(run: RunFolder, attempt: int) -> MetricsFile:
    """The metrics file, opened for appending."""
    return MetricsFile(run.metrics, attempt)


class Reporter:
    """What rank 0 tells the world while it trains: state file, progress bar, trackers. Other ranks say nothing.

    Args:
        console: the terminal from before the log took over; a bar is drawn only if it is one.
        processes: launcher and ranks, for the state file; the supervisor's entry is kept.
    """

    def __init__(
        self,
        run: RunFolder,
        made: Accelerator,
        config: TrainConfig,
        main_rank: bool,
        console: TextIO,
        processes: list[Process],
    ):
        self.run, self.made, self.main_rank, self.trackers = run, made, main_rank, bool(config.report_to)
        supervisor = [process for process in run.processes() if process.role == "supervisor"]
        self.processes = [process.as_json() for process in [*supervisor, *processes]]
        self.bar = tqdm(file=console, unit="step", disable=not (main_rank and console.isatty()))
        if self.trackers:
            if main_rank and "tensorboard" in config.report_to:
                run.own_folder(_PROJECT)
            settings = config.model_dump(exclude={"columns", "lora_target_modules", "report_to"})
            plain = {key: value for key, value in settings.items() if value is not None}
            name = {"name": config.run_name or run.id}
            made.init_trackers(_PROJECT, config=plain, init_kwargs={"wandb": name, "trackio": name})

    def state(self, **changes: Any) -> None:
        """Writes changes of the state file."""
        if not self.main_rank:
            return
        if changes.get("state") == "running" and self.run.stop_asked() is not None:
            changes["state"] = "stopping"
        try:
            self.run.write_state(processes=self.processes, **changes)
        except OSError as error:
            if how := self.run.lost():
                raise TrainingError(f"the run folder {self.run.path} was {how} while it trained") from None
            print(f"warning: the state file could not be written: {error.strerror}", flush=True)
        if changes.get("total_steps"):
            self.bar.reset(total=changes["total_steps"])
        if "step" in changes:
            self.bar.update(changes["step"] - self.bar.n)

    def row(self, row: dict[str, Any]) -> None:
        """Shows a metrics row."""
        numbers = {key: value for key, value in row.items() if isinstance(value, int | float) and key != "step"}
        shown = {key: f"{row[key]:.4g}" for key in ("loss", "eval_loss") if row.get(key) is not None}
        if "tokens_per_second" in row:
            shown["tokens_per_second"] = f"{row['tokens_per_second']:.0f}"
        self.bar.set_postfix(shown)
        print(f"step {row['step']} " + " ".join(f"{key} {value}" for key, value in shown.items()), flush=True)
        if self.trackers:
            self.made.log(numbers, step=row["step"])

    def close(self, state: str, cause: str | None, by_supervisor: bool, **more: Any) -> None:
        """Ends bar and trackers, then says how the run ended."""
        self.bar.close()
        for tracker in self.made.trackers if self.trackers else []:
            tracker.finish()  # `Accelerator.end_training` would destroy the process group too
        if self.main_rank:
            self.run.end(state, cause and without_secrets(cause), by_supervisor, **more)


def tear_down(made: Accelerator, ranks: Ranks, job: Any) -> None:
    """Leaves the process group in order; gloo is known to abort when the wrapper outlives it."""
    if made.distributed_type is not DistributedType.NO:
        job.backend = job.bare = None
        made.free_memory()
        gc.collect()
    ranks.close()
