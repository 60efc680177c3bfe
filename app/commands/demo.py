"""`tunesmith demo`: fine-tunes the embedded model on the embedded data, scored before and after."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from app.accelerate_launch import ROOT, module_argv, module_environment
from app.command_line import Args
from app.commands.runs import confirm_memory
from app.console import clean, number, report, report_json, say, show_table
from app.launch.foreground import EXIT_CODES, print_summary, run_program, speed, train
from app.launch.job import TrainJob, train_job
from trainers.config.mistakes import ConfigError
from trainers.config.objectives import PREFERENCE
from trainers.config.options import TrainConfig
from trainers.config.parse import Request
from trainers.config.presets import PRETRAIN, find_preset, model_presets
from trainers.embedded import BASE_DIR
from trainers.strategy.strategy import strategy_names

MODEL = "tiny"


def run_demo(preset: str, gpus: str | None, num_processes: str | None, runs_dir: Path, as_json: bool) -> int:
    """Trains the embedded model, scores it before and after, and reports the scores.

    A preset that builds on another run (`FirstStage`) comes after that.

    Args:
        preset: a preset of the embedded model.
        gpus: GPU ids such as `0,2`; None for the default.
        num_processes: number of processes without GPUs; None for the default.
        runs_dir: folder of run folders.
        as_json: print one JSON document.

    Returns:
        The exit status.

    Raises:
        ConfigError: for an invalid request.
    """
    presets = [f"{MODEL}-{name}" for name in model_presets(MODEL).methods if name != PRETRAIN]  # which has no answers
    if preset not in presets:
        raise ConfigError.about("preset", repr(preset), "is not one of the demo's", f"use {', '.join(presets)}")
    devices = {"gpus": gpus, "num_processes": num_processes}
    values = {name: value for name, value in devices.items() if value is not None}
    first, built_on = find_preset(preset).first, dict[str, Any]()
    stages = [(preset, built_on)]
    if first is not None:
        say(f"{first.method} first, on which {preset} builds ({first.used_as})")
        stages.insert(0, (first.method, first.options))
    for stage, options in stages:
        request = Request(options={"runs_dir": str(runs_dir), **options})
        job = train_job(Args([stage], values, request=request))
        confirm_memory(job, False, as_json)
        state = train(job, quiet=False)
        if state["state"] != "done":
            print_summary(job.run, state)
            if as_json:
                report_json(_document(job, {}, {}) | {"state": state["state"], "cause": state.get("cause")})
            return EXIT_CODES[state["state"]]
        if first is not None:
            built_on[first.used_as] = str(job.run.model)
    say("scoring the model before and after training, on unseen examples")
    before, after = score(job)
    if as_json:
        report_json(_document(job, before, after))
    else:
        _show(job, before, after)
    return 0


def _metric(config: TrainConfig) -> str:
    """What an objective should improve on unseen examples; 0 to 1."""
    if config.objective_spec.scalar_head:
        return "reward_accuracy"
    return "preference_accuracy" if PREFERENCE in config.objective_spec.formats else "exact_match"


def score(job: TrainJob) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scores the model that the run started from and the one that it trained, on the test split.

    Raises:
        RuntimeError: when the scoring program fails.
    """
    base = BASE_DIR if job.config.from_run is None else job.config.from_run
    models = ["--model", str(base), "--model", str(job.run.model)]
    preferences = {"preference_accuracy": ["--preferences"], "reward_accuracy": ["--reward"]}
    argv = module_argv(
        "trainers.tools.score",
        [*models, "--split", "test", "--samples", "3", *preferences.get(_metric(job.config), [])],
    )
    status, out, errors = run_program(argv, module_environment(), cwd=ROOT)
    if status != 0:
        raise RuntimeError(f"scoring failed with exit status {status}:\n{errors[-2000:]}")
    before, after = json.loads(out)
    return before, after


def _document(job: TrainJob, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    seconds, rate = speed(job.run)
    metric = _metric(job.config)
    keys = dict.fromkeys(("eval_loss", "exact_match", metric))
    return {
        "run_dir": str(job.run.path),
        "strategy": job.strategy.name,
        "world_size": job.devices.num_processes,
        "train_seconds": seconds,
        "tokens_per_second": rate,
        "metric": metric,
        "before": {key: before.get(key) for key in keys},
        "after": {key: after.get(key) for key in keys},
    }


def _show(job: TrainJob, before: dict[str, Any], after: dict[str, Any]) -> None:
    seconds, rate = speed(job.run)
    report(f"\nTrained in {number(seconds, 1)} s with {job.strategy.name} at {number(rate, 0)} tokens/s\n")
    scores = {"before": before, "after": after}
    metric = _metric(job.config)  # a reward model answers nothing
    shares = [metric] if metric == "reward_accuracy" else dict.fromkeys(("exact_match", metric))
    rows = [
        [name, number(values["eval_loss"]), *(number(values[share], 3) for share in shares)]
        for name, values in scores.items()
    ]
    show_table(["", "eval loss", *(share.replace("_", " ") for share in shares)], rows)
    for sample in after["samples"][:3]:
        report("")
        for name in ("prompt", "answer", "expected"):
            report(f"{name:<9}" + clean(str(sample[name])).strip().replace("\n", "\n" + " " * 9))
    report("\nThe model is in " + str(job.run.model))
    report("Next, try:")
    for line in _next_commands(job):
        report("  " + line)


def _next_commands(job: TrainJob) -> list[str]:
    """Three commands that work on this machine: train on own data, use another strategy, list the runs."""
    preset, processes = job.config.preset, job.devices.num_processes
    for option in ("from_run", "teacher"):
        if (source := getattr(job.config, option)) is not None:
            preset = f"{preset} --{option} {shlex.quote(source)}"
    others = [name for name in strategy_names() if name != job.strategy.name]
    preferred = "single" if processes > 1 else "ddp"
    other = preferred if preferred in others and (processes > 1 or not job.devices.gpu_ids) else None
    count = " --num_processes 2" if other == "ddp" else ""
    return [
        f"tunesmith train {preset} --dataset_name my.jsonl --eval_share 0.1",
        f"tunesmith train {preset} --strategy {other}{count}" if other else f"tunesmith train {preset} --seed 1",
        "tunesmith runs list",
    ]
