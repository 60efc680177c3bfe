"""The training script, for all strategies and methods.

    accelerate launch --config_file accelerate_configs/ddp.yaml trainers/train.py --preset tiny-lora --max_steps 50

The Accelerate file defines how the model is distributed; the options (`trainers/config/options.py`) define what is
trained. `--check` reports what would be trained, without training.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    # Python puts trainers/ first on the path (unless PYTHONSAFEPATH is set); the packages are one folder above.
    if not sys.flags.safe_path:
        del sys.path[0]
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

    from trainers.run.import_path import leave_out_working_folder

    leave_out_working_folder()

from trainers.monitor.startup_timer import StartupTimer

CLOCK = StartupTimer()  # before the other imports, which take most of the startup time

from trainers.config.local_paths import absolute_paths
from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.mix import read_mix
from trainers.config.objective_file import read_file, split_objective
from trainers.config.options import TrainConfig, choice_lines
from trainers.config.parse import Request, parse_request
from trainers.config.validation import ignored_choices
from trainers.run.answers_file import forget_later
from trainers.run.compatibility import changes_since_save, checkpoint_to_resume
from trainers.run.device_locks import HeldSlots, Holder, local_need, take_now
from trainers.run.ending import Ending, Retry
from trainers.run.errors import Interrupted, RollBack, TrainingError
from trainers.run.folder import Process, RunFolder, now, read_json, register_outside, write_atomic, write_json
from trainers.run.from_run import record_start, resolve_request, start_line
from trainers.run.gpus import find_gpus, gpu_count
from trainers.run.import_path import WORKING_FOLDER
from trainers.run.launch import (
    Launch,
    asked_strategy,
    check_one_root,
    exit_now,
    find_launch,
    gc_paused,
    hear_save_requests_later,
    open_run,
    rank_of_environment,
    wait_for_rank0,
    write_run_files,
)
from trainers.run.log import start_tee
from trainers.run.manifest import Progress
from trainers.run.torchrun import refuse_fresh_restart
from trainers.strategy.mesh import Mesh
from trainers.strategy.micro_batch import OPTION, fit_micro_batch, micro_batch_line
from trainers.strategy.pipeline_schedules import bubble_line
from trainers.strategy.strategy import Strategy, load_strategy, refusal
from trainers.tools.preflight import check, describe_plan, machine_mistakes, make_rows, plan_training

if TYPE_CHECKING:
    from trainers.answers import FixedPrompts
    from trainers.data.prepare import TokenSet
    from trainers.loop import Outcome
    from trainers.rollouts import Sampler
    from trainers.step import TrainContext


def main(argv: list[str]) -> int:
    """Parses the request, opens the run folder and trains.

    Returns:
        The exit status: 0 if done or stopped, 1 if failed, 2 if the request is invalid.
    """
    hear_save_requests_later()
    with contextlib.suppress(OSError):
        os.chdir(os.environ.pop(WORKING_FOLDER, "."))
    with contextlib.ExitStack() as locks:  # locks of the run and its GPUs, held until this process ends
        try:
            check_one_root()
            request = parse_request(argv)
            if request.check:
                return print_check(request)
            launch, config = find_launch(request.accelerate_config), absolute_paths(resolve_request(request))
            refuse_fresh_restart(config.resume_from_checkpoint, os.environ)
            strategy = asked_strategy(launch, config)
            config, notes = with_micro_batch(config, strategy, request)
            refuse_machine(config, strategy)
            run = open_run(config, launch)
            run.keep()
            if not launch.supervised and rank_of_environment() == 0:  # otherwise the supervisor holds it
                locks.enter_context(run.hold())
            if changes := changes_since_save(run, config, config.resume_from_checkpoint):
                raise ConfigError(changes)
            if not launch.supervised:
                locks.enter_context(take_gpus(config, run))
        except ConfigError as error:
            return report_mistakes(error, argv)
        console = start_tee(run.log, f"rank {rank_of_environment()}", echo=not launch.supervised)
        try:
            return train(config, strategy, run, launch, console, notes)
        except BaseException as error:
            return report_failure(error, run, launch)


def refuse_machine(config: TrainConfig, strategy: Strategy) -> None:
    """Raises ConfigError if the strategy does not support this config, or this machine cannot run it."""
    has_gpu = gpu_count() > 0
    problem = refusal(strategy, config, has_gpu)
    mistakes = [Mistake("", None, problem, source=f"strategy {strategy.name}")] if problem else []
    if mistakes := mistakes + machine_mistakes(config, has_gpu):
        raise ConfigError(mistakes)


def with_micro_batch(config: TrainConfig, strategy: Strategy, request: Request) -> tuple[TrainConfig, list[str]]:
    """Reduces the micro-batch size to one that divides the global batch, unless the user chose it.

    Returns:
        The config, and log lines about what was chosen.
    """
    fitted = config if OPTION in request.chosen else fit_micro_batch(config, strategy)
    line = [] if fitted == config else [micro_batch_line(config, fitted, strategy)]
    return fitted, [*request.notes, *line]


def take_gpus(config: TrainConfig, run: RunFolder) -> HeldSlots:
    """Locks the GPUs of this machine's ranks; the first local rank takes the locks for all of them.

    Raises:
        ConfigError: if another run holds one of the GPUs.
    """
    if config.share_gpus or os.environ.get("LOCAL_RANK", "0") != "0":
        return HeldSlots({})
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), [gpu.uuid for gpu in find_gpus()]
    return take_now(local_need(ranks, gpus), Holder(run.id, str(run.path)), timeout=8.0)


def in_one_line(error: BaseException) -> str:
    """An error in one line; a lost connection is explained as the failure of another rank."""
    line, _, more = str(error).strip().partition("\n")
    if "Last error:" in more:  # NCCL's own message
        line += f" ({more.partition('Last error:')[2].strip()})".replace("\n", " ")
    if any(mark in line for mark in ("Connection closed by peer", "Connection reset by peer", "Read error [")):
        return f"another rank died, was killed or hung; the last lines of log.txt tell which ({line[:80]})"
    return f"{type(error).__name__}: {line}"


def out_of_memory(error: BaseException) -> bool:
    """Whether an error is out-of-memory, so that a smaller batch might fit."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    # Besides PyTorch's allocator, the OS, the CUDA driver and its libraries report it in various ways.
    phrases = ("can't allocate memory", "CUDA error: out of memory", "_ALLOC_FAILED", "Cuda failure 2 'out of memory'")
    return bool(kinds & {"OutOfMemoryError", "MemoryError"}) or any(phrase in str(error) for phrase in phrases)


def print_check(request: Request) -> int:
    """`--check`: prints what would be trained under `TUNESMITH_STRATEGY`, and checks the space in `TUNESMITH_RUN_DIR`.

    `TUNESMITH_RESUME_FROM` names the checkpoint to resume from, which the options file of a run never contains.
    `TUNESMITH_GPUS_ELSEWHERE` is the number of GPUs of the machine that is to train, if that is another.

    Returns:
        The exit status.
    """
    config, run_dir = resolve_request(request), os.environ.get("TUNESMITH_RUN_DIR")
    if source := os.environ.get("TUNESMITH_RESUME_FROM"):
        config = config.model_copy(update={"resume_from_checkpoint": source})
    strategy = load_strategy(os.environ.get("TUNESMITH_STRATEGY", "single"))
    elsewhere = os.environ.get("TUNESMITH_GPUS_ELSEWHERE")
    has_gpu = gpu_count() > 0 if elsewhere is None else elsewhere != "0"
    folder = Path(run_dir) if run_dir else None
    print("\n".join(check(config, strategy, has_gpu, folder, on_this_machine=elsewhere is None)), flush=True)
    return 0


def report_mistakes(error: ConfigError, argv: list[str]) -> int:
    """Prints the mistakes in the request on rank 0; returns the exit status."""
    if rank_of_environment() == 0:
        print("\n".join(error.lines), file=sys.stderr, flush=True)
        if "--check" in argv:  # JSON for the calling program; last, as libraries print to both streams
            print(json.dumps({"mistakes": error.as_json()}), flush=True)
    wait_for_rank0()
    return 2


def ending_of(error: BaseException) -> Ending:
    """How an error ends the run, and whether to retry.

    Configuration and training errors are deterministic, so a retry would fail again, except after a loss spike, which
    rolls back, and what was interrupted from outside. Any other error is retried.
    """
    if isinstance(error, ConfigError):
        return Ending("failed", "; ".join(error.lines), retry="never")
    if isinstance(error, TrainingError):
        outside: Retry = "again" if isinstance(error, Interrupted) else "never"
        return Ending("failed", str(error), retry="roll_back" if isinstance(error, RollBack) else outside)
    return Ending("failed", in_one_line(error), retry="again")


def report_failure(error: BaseException, run: RunFolder, launch: Launch) -> int:
    """Records how the run ended: rank 0 in the run's state, others in a note for rank 0. Returns the exit status."""
    ending, rank = ending_of(error), rank_of_environment()
    crashed = ending.retry == "again" and not isinstance(error, TrainingError)
    if crashed:
        traceback.print_exc()
        if out_of_memory(error):
            run.note_out_of_memory(rank)
    if rank > 0:
        if ending.retry != "roll_back":  # perhaps this rank alone failed
            run.note_failure(rank, str(ending.cause))
        if not crashed:
            wait_for_rank0()
    else:
        if crashed:
            ending = replace(ending, cause=run.noted_failure() or ending.cause)
        print(ending.cause, file=sys.stderr, flush=True)
        with contextlib.suppress(FileNotFoundError):  # the run folder was removed
            run.end(ending, launch.supervised)
    return 2 if isinstance(error, ConfigError) else 1


def train(
    config: TrainConfig, strategy: Strategy, run: RunFolder, launch: Launch, console: Any, notes: Sequence[str] = ()
) -> int:
    """Runs training on this rank: data, model, strategy, loop, export. Returns the exit status."""
    main_rank = rank_of_environment() == 0
    attempt = begin(config, strategy, run, launch) if main_rank else 0

    with gc_paused():
        from trainers import build
        from trainers.checkpoint.weights import base_digest, persistent_buffers
        from trainers.data.prepare import prepare_splits, report_lines
        from trainers.model.sizes import used_matmul_parameters
        from trainers.monitor.heartbeat import Heartbeat
        from trainers.monitor.metrics import memory_gib
        from trainers.monitor.profiler import StepProfiler
        from trainers.monitor.reporter import Reporter
        from trainers.monitor.self_check import compare, refuse_differences, table
        from trainers.monitor.stragglers import Stragglers
        from trainers.parallel.sequence import sequence_shard
    from trainers.step import TrainContext

    CLOCK.ended("imports")
    # Tokenise before creating the process group: a collective would time out while one rank tokenises.
    data, eval_data = prepare_splits(config)
    shard = sequence_shard(Mesh(strategy.sizes, rank_of_environment()))
    plan = plan_training(config, data, strategy.data_parallel_size, shard)
    CLOCK.ended("data")

    accelerator, ranks, mesh = build.accelerator(config, strategy)
    attempt = ranks.broadcast(attempt)
    CLOCK.ended("processes")
    loss = build.module(config, main_rank, [data, eval_data], plan)
    base = ranks.broadcast(base_digest(loss.model, loss.stored) if main_rank else "")
    checkpoints = build.checkpoints(config, strategy, run, ranks, data.fingerprint, base, attempt)
    folder = build.resume_folder(config, checkpoints)
    progress = build.load_first_weights(config, checkpoints, folder, loss)
    progress.skipped_steps = ranks.broadcast(sorted({*progress.skipped_steps, *run.read_skipped_steps()}))
    buffers, memory = persistent_buffers(loss.model), memory_gib(ranks.device)
    trained, frozen = used_matmul_parameters(loss.base)  # before layers are split over ranks
    teacher = loss.penalizes_kl * frozen if loss.teacher is None else sum(used_matmul_parameters(loss.teacher.base))
    CLOCK.ended("model")
    backend, dtypes = build.backend(config, strategy, accelerator, ranks, mesh, loss)
    lines = compare(strategy, config, accelerator, mesh, backend, loss, dtypes)
    by_rank = ranks.gather((memory, memory_gib(ranks.device)))
    if main_rank:
        print(f"run {run.path}\n{table(lines, ranks, backend, dtypes, by_rank)}", describe_plan(plan), *notes,
              *report_lines(data, eval_data), *choice_lines(config), *pipeline_lines(config, strategy),
              *warnings(config, strategy, launch.supervised), sep="\n", flush=True)  # fmt: skip
    refuse_differences(lines, ranks)
    CLOCK.ended("wrap")

    processes = [launch.launcher, *ranks.gather(Process.of("rank", ranks.rank))]
    local_forward = strategy.distributed_type in ("NO", "MULTI_GPU") and not strategy.has_mesh
    resumed_at = progress.step if folder is not None else None
    reporter = Reporter(run, config, resumed_at, main_rank, console, processes)
    context = TrainContext(
        config=config, run=run, ranks=ranks, mesh=mesh, backend=backend,
        bare=loss.model, balancing=loss.balancing, buffers=buffers, matmul_parameters=(trained, frozen, teacher),
        scaler=accelerator.scaler, plan=plan, checkpoints=checkpoints,
        eval_rows=make_rows(config, eval_data, shard, "eval") if eval_data else None,
        heartbeat=Heartbeat(run, ranks.rank, config.hang_timeout),
        metrics=build.metrics_file(run, attempt) if main_rank else None,
        report=reporter.state, show=reporter.row,
        launcher=launch.parent, clock=CLOCK, stragglers=Stragglers(ranks.device, local_forward),
        profiler=StepProfiler(config, run, ranks.rank),
    )  # fmt: skip
    with contextlib.closing(context.heartbeat):
        if config.eval_only:
            outcome = evaluation(context, data, loss.base)
        else:
            if config.objective_spec.samples:
                context.sampler = build_sampler(context, eval_data, loss.base, folder)
            context.answers = build_answers(context, eval_data, loss.base, progress, folder)
            outcome = training(context, strategy, progress, folder)
        del backend, loss  # the wrapper must not outlive the process group
        build.tear_down(accelerator, ranks, context)
        exports = outcome.ending.state == "done" and main_rank and not config.eval_only
        ending = export(context, outcome) if exports else outcome.ending
    reporter.close(ending, launch.supervised)
    return 1 if ending.state == "failed" else 0


def training(context: TrainContext, strategy: Strategy, progress: Progress, folder: Path | None) -> Outcome:
    """Trains to the last step or the next stop.

    Args:
        context: the run.
        strategy: its strategy.
        progress: where it begins.
        folder: the checkpoint that it resumes from; None for a new run.
    """
    from trainers.loop import TrainLoop
    from trainers.reference import set_reference

    if context.config.objective_spec.reference:
        set_reference(context, strategy, folder)
    return TrainLoop(context, progress, folder).run()


def evaluation(context: TrainContext, documents: TokenSet, base: Any) -> Outcome:
    """`eval_only`: evaluates each row, and trains nothing; the arguments are those of `evaluate_rows`."""
    from trainers.loop import Outcome
    from trainers.row_evaluation import evaluate_rows

    return Outcome(evaluate_rows(context, documents, base), Progress())


def build_sampler(
    context: TrainContext, evaluation: TokenSet | None, base: Any, folder: Path | None
) -> Sampler:  # fmt: skip
    """What samples the answers of each step.

    Args:
        context: the run.
        evaluation: the evaluation data; None without.
        base: the transformers model.
        folder: the checkpoint that the run resumes from; None for a new run.
    """
    from trainers.rollouts import Sampler

    config, plan, backend, checkpoints = context.config, context.plan, context.backend, context.checkpoints
    sampler = Sampler(config, plan, evaluation, backend, context.mesh, context.ranks, context.run, checkpoints, base)
    if config.sampler_url:
        from trainers.served import ServedSampling

        ends = sampler.vocabulary, sampler.stops
        sampler.served = ServedSampling(config, context.bare, backend, context.ranks, context.run, *ends)
    if folder is not None:
        sampler.restore(folder)
    return sampler


def build_answers(
    context: TrainContext, evaluation: TokenSet | None, base: Any, progress: Progress, folder: Path | None
) -> FixedPrompts | None:  # fmt: skip
    """What answers the same prompts as training goes on; None without `eval_generate_steps`.

    Removes answers of steps that are trained again, in any case: an earlier attempt may have left them.

    Args:
        context: the run.
        evaluation: the evaluation data; None without.
        base: the transformers model.
        progress: where training begins.
        folder: the checkpoint that the run resumes from; None for a new run.
    """
    config, backend, mesh, ranks, run = context.config, context.backend, context.mesh, context.ranks, context.run
    if ranks.is_main:
        forget_later(run.answers, None if folder is None else progress.step)
    if not config.generates_answers:
        return None
    from trainers.answers import FixedPrompts

    assert evaluation is not None
    return FixedPrompts(config, evaluation, backend, mesh, ranks, run, base)


def export(context: TrainContext, outcome: Outcome) -> Ending:
    """Exports the model of a finished run; rank 0 only. Returns how the run ends."""
    from trainers.checkpoint.export import export_checkpoint, export_kind, export_seconds
    from trainers.run.model_card import measured_at

    config, run = context.config, context.run
    run.refuse_lost()
    chosen = context.checkpoints.path(outcome.results["exported_step"])
    context.heartbeat.at("export", outcome.progress.step, export_seconds(chosen, config))
    results = measured_at(outcome.results, outcome.progress.step)
    export_checkpoint(chosen, config, run.model, export_kind(config), results, run.record)
    return replace(outcome.ending, export_dir=str(run.model))


def begin(config: TrainConfig, strategy: Strategy, run: RunFolder, launch: Launch) -> int:
    """Writes the initial state of this attempt; rank 0 only. Returns the attempt number."""
    from trainers.data.tokenizer import template_record

    before = run.read_state()
    run.forget_last_attempt()
    write_json(run.chat_template, template_record(config))
    if split_objective(config.objective):
        write_atomic(run.objective, read_file("objective", config.objective).decode())
    resumes = checkpoint_to_resume(config.resume_from_checkpoint, run.path) is not None
    if config.mix is not None and (config.force_resume or not resumes):  # otherwise it is the same, or refused
        write_atomic(run.mix, read_mix(config.mix).dump())
    if start := record_start(config, read_json(run.start), resumes):
        write_json(run.start, start)
        if not resumes:
            print(start_line(config, start), flush=True)
    if launch.supervised:
        return int((before or {}).get("attempt", 0))
    attempt = int(before["attempt"]) + 1 if before else 0
    for request in (run.stop_request, run.save_request):
        request.unlink(missing_ok=True)
    run.remove_unfinished()
    run.write_state(state="starting", cause=None, attempt=attempt, launched_at=now(),
                    processes=[launch.launcher.as_json()])  # fmt: skip
    write_run_files(run, config, strategy)
    register_outside(run, config.runs_dir)
    return attempt


def pipeline_lines(config: TrainConfig, strategy: Strategy) -> list[str]:
    """A log line about the pipeline's bubble; empty without a pipeline."""
    if strategy.pp_size == 1:
        return []
    micro_batches = config.accumulation_steps(strategy.data_parallel_size)
    return [bubble_line(strategy.pp_schedule, strategy.pp_size, micro_batches)]


def warnings(config: TrainConfig, strategy: Strategy, supervised: bool) -> list[str]:
    """Warnings about options without effect, cautions of the strategy, and options outside the parity promise."""
    outside = config.outside_parity() + strategy.outside_parity()
    promise = (
        [f"outside the promise that the strategy never changes the model: {', '.join(outside)}"] if outside else []
    )
    alone = config.auto_find_batch_size and not supervised
    restarts = ["auto_find_batch_size is ignored: only `tunesmith train` starts a run again"] if alone else []
    ignored = [str(mistake) for mistake in ignored_choices(config)]
    return [f"warning: {line}" for line in ignored + strategy.cautions(config) + restarts + promise]


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
