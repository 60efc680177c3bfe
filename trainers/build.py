"""Builds the parts of a run: Accelerator, wrapped model and optimizer, checkpoints, reports."""

from __future__ import annotations

import copy
import gc
import os
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import ParallelismConfig, set_seed
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.utils import logging

from trainers.checkpoint.checkpoint import Checkpoints
from trainers.checkpoint.remote import RemoteCopy, is_url, split_step
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.teacher import about_frozen
from trainers.data.batches import TrainPlan
from trainers.data.padding import check_last_tokens
from trainers.data.prepare import TokenSet
from trainers.model.attention import KERNELS, avoid_cudnn
from trainers.model.attention_kernel import choose
from trainers.model.experts import adapter_lines
from trainers.model.fp8 import convert
from trainers.model.load import build_unread, compile_blocks, compute_dtype
from trainers.model.probe import check_model_computes
from trainers.model.qat import prepare
from trainers.model.reachability import expert_list, reach_noted
from trainers.model.rope_scaling import scaled_positions
from trainers.model.weight_names import first_names
from trainers.monitor.metrics import MetricsFile
from trainers.monitor.self_check import DtypeProbe
from trainers.objectives.load_balancing import balancing_lines
from trainers.objectives.loss_module import LossModule
from trainers.objectives.objective import document_loss
from trainers.parallel.adafactor import Adafactor
from trainers.parallel.backend import Backend
from trainers.parallel.cpu import adapt_to_cpu
from trainers.parallel.experts import divide_experts
from trainers.parallel.fill import passing_through
from trainers.parallel.fsdp import FullySharded
from trainers.parallel.muon import Muon
from trainers.parallel.pipeline import Pipelined
from trainers.parallel.ranks import Ranks
from trainers.parallel.replicated import Replicated
from trainers.parallel.sequence import refuse_unsplittable_rows, share_rows
from trainers.parallel.shards import check_coverage
from trainers.parallel.tensor import split_model
from trainers.principal import set_initial_adapter
from trainers.run.compatibility import plain, recorded_versions
from trainers.run.errors import TrainingError
from trainers.run.folder import RunFolder, read_json
from trainers.run.from_run import adapter_of
from trainers.run.manifest import Origin, Progress
from trainers.strategy.mesh import Mesh
from trainers.strategy.strategy import Strategy
from trainers.teacher import add_frozen
from trainers.tools.preflight import check_positions, check_token_ids

_HOOKS = {
    "none": DDPCommunicationHookType.NO,
    "fp16": DDPCommunicationHookType.FP16,
    "bf16": DDPCommunicationHookType.BF16,
    "power_sgd": DDPCommunicationHookType.POWER_SGD,
}
_HALF_AN_HOUR = 1800


def _collectives_wait(config: TrainConfig) -> timedelta:
    """Sets and returns the timeout of collectives in every process group.

    By default, it exceeds `hang_timeout`, so that the heartbeat can report the hanging rank before the others give up.
    It also replaces torch's own defaults, for groups that device meshes and DeepSpeed create.
    """
    seconds = config.ddp_timeout or max(_HALF_AN_HOUR, config.hang_timeout) + 300
    timeout = timedelta(seconds=seconds)
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    return timeout


def asked_backend(config: TrainConfig) -> str | None:
    """The communication backend that the user chose; None for the one that Accelerate takes."""
    return None if config.ddp_backend == "auto" else config.ddp_backend


def accelerator(config: TrainConfig, strategy: Strategy) -> tuple[Accelerator, Ranks, Mesh]:
    """Creates the process group, the Accelerator and the mesh that the Accelerate file specifies, and sets the seed."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    avoid_cudnn()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32
    adapt_to_cpu()
    if strategy.distributed_type == "DEEPSPEED":
        from trainers.parallel.zero import build_extensions  # DeepSpeed is an extra

        # On a CPU, DeepSpeed compiles its own all-reduce when the process group is created.
        build_extensions(["ShareMemCommBuilder"] if os.environ.get("DS_ACCELERATOR") == "cpu" else [])
    os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)  # it would silently divide gradients
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # rank 0 has no more weights to send than the others
    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)  # we build the mesh: Accelerate's lacks packing
    ddp = DistributedDataParallelKwargs(
        bucket_cap_mb=config.ddp_bucket_cap_mb,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        comm_hook=_HOOKS[config.ddp_comm_hook],
        # By default, torch does not compress during the first 1,000 steps.
        comm_state_option={"start_powerSGD_iter": 10} if config.ddp_comm_hook == "power_sgd" else {},
    )
    timeout = _collectives_wait(config)
    accelerator = Accelerator(
        # The loss module applies autocast for all strategies; fp16 also needs Accelerate's gradient scaler.
        mixed_precision="fp16" if config.mixed_precision == "fp16" else "no",
        kwargs_handlers=[ddp, InitProcessGroupKwargs(backend=asked_backend(config), timeout=timeout)],
    )
    unset_hf_deepspeed_config()  # under ZeRO 3, transformers would partition weights on loading
    set_seed(config.seed)
    ranks = Ranks(accelerator.device)
    mesh = Mesh(strategy.sizes, ranks.rank, ranks.device.type if strategy.has_mesh else None)
    if strategy.mesh and strategy.distributed_type == "FSDP":
        accelerator.state.device_mesh = mesh.device_mesh
        accelerator.state.parallelism_config = ParallelismConfig(
            dp_replicate_size=mesh.sizes.dp_replicate, dp_shard_size=mesh.sizes.dp_shard * mesh.sizes.sequence_shards
        )
    if strategy.mesh and strategy.distributed_type == "MULTI_GPU":
        accelerator.ddp_handler = _over_group(ddp, mesh.group("grad_group"))
    return accelerator, ranks, mesh


def _over_group(ddp: DistributedDataParallelKwargs, group: Any) -> Any:
    """A copy of DDP's settings that adds a process group, which Accelerate's handler has no field for."""

    class OverGroup(DistributedDataParallelKwargs):
        def to_kwargs(self) -> dict[str, Any]:
            return {**super().to_kwargs(), "process_group": group}

    narrowed = copy.copy(ddp)
    narrowed.__class__ = OverGroup
    return narrowed


def module(
    config: TrainConfig, main_rank: bool, splits: Sequence[TokenSet | None] = (), plan: TrainPlan | None = None
) -> LossModule:
    """Builds the model and its loss before any strategy wraps it, and leaves the base's weights in their files.

    Args:
        config: the run's config.
        main_rank: whether this rank prints.
        splits: the data sets, whose token ids and lengths the model must support.
        plan: the batches; it checks what a stream reads later.

    Raises:
        ConfigError: if the model cannot be loaded, or a token id or position has no embedding.
    """
    if not main_rank:
        logging.disable_progress_bar()
    # Users cannot act on deprecations inside the libraries.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft|accelerate|torch)\.")
    model, stored = build_unread(config)
    if config.mixed_precision == "fp8":
        convert(model)
    if config.qat != "none":
        prepare(config, model)
    offloads = config.gradient_checkpointing and config.activation_offloading
    loss = LossModule(model, compute_dtype(config), offloads, document_loss(config))
    loss.stored = stored
    if config.neftune_noise_alpha > 0:
        loss.accept_noise()
    if main_rank and (lines := adapter_lines(model) + balancing_lines(loss.balancing)):
        print("\n".join(lines), flush=True)
    add_frozen(config, loss, splits)
    check = document_check(config, loss)
    check(*splits)
    if plan is not None:
        plan.check = check
    return loss


def document_check(config: TrainConfig, loss: LossModule) -> Callable[..., None]:
    """A function that raises ConfigError for data sets with a token or position that the model has no embedding for."""
    vocab_size, positions = loss.vocab_size, scaled_positions(config, loss.base.config.get_text_config())

    def check(*splits: TokenSet | None) -> None:
        check_token_ids(config, splits, vocab_size)
        check_last_tokens(config, splits)
        check_positions(config, splits, positions)

    return check


def backend(
    config: TrainConfig, strategy: Strategy, accelerator: Accelerator, ranks: Ranks, mesh: Mesh, loss: LossModule
) -> tuple[Backend, DtypeProbe]:
    """Wraps model and optimizer for the strategy, and probes that the wrapped model computes correctly. Collective.

    Returns:
        The backend, and the dtypes recorded during the probe.

    Raises:
        ConfigError: if the model does not fit the strategy or fails the probe.
        TrainingError: if the weights are not laid out over the ranks as expected.
    """
    models = [loss, *([loss.teacher] if loss.teacher is not None else [])]  # FSDP 1 replaces `loss.teacher`
    for part in models:
        refuse_unsplittable_rows(part.base.config.get_text_config(), mesh.sizes)
    precision = torch.bfloat16 if config.tf32 else loss.compute
    if mesh.sizes.pp > 1:  # once split, no rank can run the full model
        check_on_cpu(loss, config.packing, precision, ranks)
    # Kernel, tensor parallelism and compilation change modules in place: apply them before wrapping.
    for part in models:
        if part.base.config._attn_implementation in KERNELS.values():
            _use_kernel(config, ranks, part)
    _split_tensors(config, mesh, loss, ranks)
    divide_experts(loss, mesh)
    if config.torch_compile:
        compile_blocks(loss.base)
    if not can_fill_gradients(strategy):
        refuse_varying_graph(loss)
    if mesh.sizes.pp > 1:
        backend: Backend = Pipelined.on(mesh, loss, config, ranks.device, strategy.pp_schedule)
    elif strategy.distributed_type == "FSDP":
        backend = FullySharded(loss, config, accelerator, ranks, mesh)
    elif strategy.distributed_type == "DEEPSPEED":
        from trainers.parallel.zero import Zero

        if strategy.zero_stage == 3 and config.packing and any(part.mixers for part in models):
            raise _unequal_calls(loss)
        backend = Zero(loss, config, accelerator, ranks, mesh)
    else:
        backend = Replicated(loss, config, accelerator)
    if strategy.distributed_type in ("FSDP", "DEEPSPEED") or strategy.splits_model:
        check_coverage(backend.shards(), ranks)
    optimizer = getattr(backend.optimizer, "optimizer", backend.optimizer)
    if isinstance(optimizer, (Muon, Adafactor)):
        optimizer.attach(backend.shapes, backend.shards_of, ranks)
    with DtypeProbe(loss) as dtypes:
        splits_rows, stock = mesh.sizes.sequence_shards > 1, mesh.sizes.pp == 1
        for part in models:
            model, of_teacher = backend.model, part is not loss
            check_model_computes(
                model, part.base, config.packing, ranks.device, precision, stock, splits_rows, of_teacher
            )
    for part in models:
        share_rows(part, mesh)
    backend.warm_up_buckets()
    return backend, dtypes


def _split_tensors(config: TrainConfig, mesh: Mesh, loss: LossModule, ranks: Ranks) -> None:
    """Splits the model, and the frozen one beside it so that each rank has the same tokens of both vocabularies."""
    group = mesh.group("tp"), mesh.index("tp"), mesh.sizes.tp
    split_model(loss, *group)
    if loss.tensor is not None and loss.tensor.shards is None and ranks.is_main:
        kind = loss.base.config.model_type
        print(
            f"{mesh.sizes}: between blocks of {kind} every rank keeps all tokens, as it could not be shown that only "
            "norms see them there",
            flush=True,
        )
    if loss.teacher is not None:
        with about_frozen(config):
            split_model(loss.teacher, *group, like=loss.vocabulary.vocab_size)


def can_fill_gradients(strategy: Strategy) -> bool:
    """Whether a strategy can sum a gradient that some ranks lack, with zeros from those."""
    if strategy.zero_stage or strategy.sizes.pp > 1:
        return False
    is_fsdp2 = strategy.distributed_type == "FSDP" and strategy.fsdp["fsdp_version"] == 2
    return not is_fsdp2 or hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # older torch lacks it


def refuse_varying_graph(loss: LossModule) -> None:
    """Raises ConfigError if a batch decides which trained weights get a gradient, such as those of experts in a list.

    Ranks would sum the gradients of different weights.
    """
    sometimes = {name.rpartition(".")[0] for name in reach_noted(loss.base).sometimes}
    trained = [name for name, weight in loss.model.named_parameters() if weight.requires_grad]
    names = [name for name in trained if expert_list(name) or any(f"{part}." in f".{name}" for part in sometimes)]
    if names:
        raise ConfigError(
            f"{loss.base.config.model_type}: each batch has a gradient for others of {len(names)} weights "
            f"({first_names(names)}), of which the processes of this strategy would sum different ones; use another, "
            "such as ddp or fsdp2"
        )


def _unequal_calls(loss: LossModule) -> ConfigError:
    """ZeRO 3 gathers weights at each call, and mixing layers are called once for each group of a rank's documents."""
    return ConfigError.about(
        "packing",
        True,
        f"with {loss.base.config.model_type} under ZeRO 3: the layers that mix tokens without attention run a "
        "different number of times on each process, which would wait for each other forever",
        "use packing=false, or another strategy, such as fsdp2",
    )


def check_on_cpu(loss: LossModule, packing: bool, precision: torch.dtype, ranks: Ranks) -> None:
    """Probes a full model on rank 0's CPU with eager attention, as GPU kernels do not run there. Collective.

    Raises:
        ConfigError: see `check_model_computes`.
    """
    if loss.base.config._attn_implementation in KERNELS.values():
        loss.base.set_attn_implementation(KERNELS["eager"])
    lines, cpu = None, torch.device("cpu")
    try:
        if ranks.is_main:
            with passing_through(loss, cpu):
                check_model_computes(loss, loss.base, packing, cpu, precision)
    except ConfigError as error:
        lines = error.lines
    if lines := ranks.broadcast(lines):
        raise ConfigError(lines)


def _use_kernel(config: TrainConfig, ranks: Ranks, loss: LossModule) -> None:
    """Sets the model's attention kernel, the same on every rank: `sdpa` if the ranks choose differently. Collective."""
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
    """Builds the checkpoint manager of the run, with the provenance to record in each checkpoint. Collective.

    Args:
        config: the run's config.
        strategy: the run's strategy.
        run: the run folder.
        ranks: all processes of the run.
        fingerprint: fingerprint of the training data.
        base: digest of the frozen weights.
        attempt: number of this start of the run.

    Raises:
        TrainingError: on every rank, if `checkpoint_url` cannot be used.
    """
    origin = Origin(strategy.name, plain(config), fingerprint, base, recorded_versions(config), read_json(run.start))
    checkpoints = Checkpoints(run.checkpoints, ranks, origin, config.save_total_limit, attempt, config.force_resume)
    error = None
    if ranks.is_main and config.checkpoint_url:
        try:
            checkpoints.remote_copy = RemoteCopy(config.checkpoint_url, checkpoints.limit)
            checkpoints.remote_copy.check_writable()
        except TrainingError as problem:
            error = problem
    ranks.agree(error, "reaching checkpoint_url")
    return checkpoints


def resume_folder(config: TrainConfig, checkpoints: Checkpoints) -> Path | None:
    """The checkpoint to resume from, downloaded if necessary; None to start at step 0. Collective.

    Raises:
        TrainingError: on every rank, if it cannot be fetched, or a new run would mix its copies with another run's.
    """
    source = config.resume_from_checkpoint
    if source is None or not _is_own(source, checkpoints):
        _refuse_used_mirror(checkpoints)
    if source is None:
        return None
    if source == "auto":
        folder = checkpoints.newest()
    else:
        folder = _fetched(source, checkpoints) if is_url(source) else Path(source)
    if folder is None and checkpoints.ranks.is_main:
        print("there is no checkpoint to resume from; it starts at step 0", flush=True)
    return folder


def load_first_weights(
    config: TrainConfig, checkpoints: Checkpoints, folder: Path | None, loss: LossModule
) -> Progress:
    """Loads the weights that this attempt begins with: those of a checkpoint, or of the run to start from. Collective.

    Args:
        config: the run's config.
        checkpoints: the run's checkpoints.
        folder: the checkpoint to resume from; None to start at step 0.
        loss: holds the unwrapped model.

    Raises:
        ConfigError: if the adapter that `from_run` names does not fit.
    """
    progress = Progress()
    if folder is not None:
        progress = checkpoints.load(folder, loss.model, loss.stored)
    elif adapter_of(config):
        from trainers.model.adapter import load_start  # imports peft, which other runs do without

        load_start(config, loss.model)
    if config.method != "full" and config.init_lora_weights != "default":
        set_initial_adapter(config.init_lora_weights, checkpoints, folder, loss)
    return progress


def _is_own(source: str, checkpoints: Checkpoints) -> bool:
    """Whether a run resumes from one of its own checkpoints, rather than branching off another run."""
    if is_url(source):
        return checkpoints.remote_copy is not None and split_step(source)[0] == checkpoints.remote_copy.url
    return source == "auto" or Path(source).expanduser().resolve().parent == checkpoints.folder.resolve()


def _refuse_used_mirror(checkpoints: Checkpoints) -> None:
    """Raises TrainingError if the URL for copies already has some, which a new run would mistake for its own.

    Collective.
    """
    error = None
    try:
        remote = checkpoints.remote_copy
        if remote and (steps := remote.steps()):
            error = TrainingError(
                f"checkpoint_url={remote.url} holds checkpoints, the newest of step {steps[0]}; continue from them "
                "with --resume_from_checkpoint auto, or use another"
            )
    except TrainingError as problem:
        error = problem
    checkpoints.ranks.agree(error, "starting a new run")


def _fetched(url: str, checkpoints: Checkpoints) -> Path:
    """Downloads the checkpoint at `URL/step-00000010`, or the newest one at `URL`. Collective.

    Raises:
        TrainingError: on every rank, if there is no valid checkpoint, or the URL cannot be read.
    """
    error, folder = None, None
    if checkpoints.ranks.is_main:
        base_url, step = split_step(url)
        try:
            source = checkpoints.remote_copy  # reuse it: it keeps copies that it could not read
            if source is None or source.url != base_url:
                source = RemoteCopy(base_url, checkpoints.limit)
            target = checkpoints.folder
            folder = source.fetch(step, target) if step is not None else source.fetch_newer(-1, target)
            if folder is None:
                error = TrainingError(f"there is no complete checkpoint at {url}; check the URL")
        except TrainingError as problem:
            error = problem
    checkpoints.ranks.agree(error, f"fetching {url}")
    return Path(checkpoints.ranks.broadcast(str(folder)))


def metrics_file(run: RunFolder, attempt: int) -> MetricsFile:
    """Opens the metrics file for appending."""
    return MetricsFile(run.metrics, attempt)


def tear_down(accelerator: Accelerator, ranks: Ranks, context: Any) -> None:
    """Frees the wrapped model, then destroys the process group; gloo aborts if the wrapper outlives it.

    A single process frees it too: the export loads the full model again.
    """
    if context.sampler is not None and context.sampler.served is not None:
        context.sampler.served.close()
    context.backend = context.bare = context.sampler = context.answers = None
    accelerator.free_memory()
    gc.collect()
    ranks.close()
