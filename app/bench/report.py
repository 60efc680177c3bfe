"""Reports the measurements of `tunesmith bench`: the advice, the document, the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.bench.plan import SETTINGS, WARM, Plan, Trial
from app.console import clean, number, report, show_table
from app.launch.job import as_argument

LEAST_GAIN = 0.03
"""Relative gain in tokens per second below which a change is not worth it, however low the noise."""
LEAST_SAVING = 0.1
"""The same for memory."""
SAME_LOSS = 0.01
"""Largest relative difference of the first loss from that of the user's settings; rounding is far below it."""
_LOSS = "loss, first to last"
_HEADERS = ("setting", "tokens/s", "vs yours", "spread", "s/step", "memory GiB", _LOSS)
_EXPENDABLE = (_LOSS, "spread", "s/step", "memory GiB")


# -- the arithmetic --------------------------------------------------------------------------------------------------


def ratio(trial: Trial, base: Trial, measure: str = "tokens_per_second") -> float | None:
    """The median of a trial relative to that of the user's settings; None if either is missing."""
    median = trial.median(measure)
    base_median = base.median(measure)
    return None if median is None or not base_median else median / base_median


def noise(trial: Trial, base: Trial) -> float:
    """The gain that must be exceeded: the larger spread of the two, at least `LEAST_GAIN`."""
    return max(base.spread, trial.spread, LEAST_GAIN)


def trains_otherwise(trial: Trial, base: Trial) -> bool:
    """Whether the loss differs although it must not; only `packing` may change it."""
    loss, base_loss = trial.median("first_loss"), base.median("first_loss")
    if "packing" in trial.changes or base_loss is None:
        return False
    return loss is None or abs(loss - base_loss) > SAME_LOSS * abs(base_loss)


def helps(trial: Trial, base: Trial) -> bool:
    """Whether the change gains more than the noise; needs at least two runs of each."""
    gain = ratio(trial, base)
    repeated = min(len(trial.runs), len(base.runs)) > 1 and trial.outcome == "measured"
    return repeated and gain is not None and gain - 1 > noise(trial, base) and not trains_otherwise(trial, base)


def helpful(base: Trial, variants: Sequence[Trial]) -> list[Trial]:
    """The variants that help, fastest first; only the fastest value of each option."""
    helping = sorted((trial for trial in variants if helps(trial, base)), key=_rate, reverse=True)
    best: dict[tuple[str, ...], Trial] = {}
    for trial in helping:
        best.setdefault(tuple(trial.changes), trial)
    return list(best.values())


def _rate(trial: Trial) -> float:
    return trial.median("tokens_per_second") or 0.0


def advice(base: Trial, variants: Sequence[Trial], combined: Trial | None) -> list[dict[str, Any]]:
    """What to change, largest gain first, then what saves most memory; empty if nothing helps."""
    if not base.runs:
        fits = sorted((trial for trial in variants if trial.outcome == "measured"), key=_rate, reverse=True)
        return [_entry(trial, base, "fit", _fits(trial)) for trial in fits[:1]]
    faster = helpful(base, variants)
    if combined and helps(combined, base):
        faster = sorted([combined, *faster], key=_rate, reverse=True)
    lines = [
        _entry(trial, base, "speed", f"{'or' if rank else 'use'} {trial.flags}: {_numbers(trial, base)}")
        for rank, trial in enumerate(faster)
    ]
    saving = [trial for trial in variants if trial not in faster and _saves(trial, base)]
    least = min(saving, key=lambda trial: trial.median("memory_gib") or 0.0, default=None)
    text = f"if memory is short, {least.flags}: {_numbers(least, base)}" if least else ""
    return [*lines, *([_entry(least, base, "memory", text)] if least else [])]


def _saves(trial: Trial, base: Trial) -> bool:
    share = ratio(trial, base, "memory_gib")
    same = "packing" not in trial.changes and not trains_otherwise(trial, base)
    return same and trial.outcome == "measured" and share is not None and share < 1 - LEAST_SAVING


def _numbers(trial: Trial, base: Trial) -> str:
    memory = f"memory {number(base.median('memory_gib'), 2)} -> {number(trial.median('memory_gib'), 2)} GiB"
    text = f"{number(ratio(trial, base), 2)}x tokens/s, {memory}"
    if "packing" not in trial.changes:
        return text
    before, after = (round(_rate(each) * (each.median("seconds_per_step") or 0.0)) for each in (base, trial))
    return f"{text}; it changes the rows of a step: {after:,} tokens instead of {before:,}"


def _fits(trial: Trial) -> str:
    rate, memory = number(trial.median("tokens_per_second"), 0), number(trial.median("memory_gib"), 2)
    return f"use {trial.flags} to make it fit: {rate} tokens/s, memory {memory} GiB"


def _entry(trial: Trial, base: Trial, goal: str, text: str) -> dict[str, Any]:
    return {"options": trial.changes, "ratio": ratio(trial, base), "memory_gib": trial.median("memory_gib"),
            "for": goal, "text": text}  # fmt: skip


# -- the document ----------------------------------------------------------------------------------------------------


def document_of(plan: Plan, combined: Trial | None, steps: int | None) -> dict[str, Any]:
    """The report as plain values.

    Args:
        plan: the plan, after its trials have run.
        combined: the trial with all changes that help.
        steps: number of timed steps; None if no run completed.
    """
    base, job = plan.base, plan.job
    tried = [*plan.variants, *([combined] if combined else [])]
    settings = {name: getattr(job.config, name) for name in SETTINGS}
    return {
        "base": {**_numbers_of(base, base), "settings": settings},
        "variants": [_numbers_of(trial, base) for trial in tried],
        "advice": advice(base, plan.variants, combined),
        "noise": base.spread if len(base.runs) > 1 else None, "steps": steps, "warm_steps": WARM, "turns": plan.turns,
        "strategy": job.strategy.name, "world_size": job.devices.num_processes, "method": job.config.method,
        "global_batch_size": job.config.global_batch_size,
    }  # fmt: skip


def _numbers_of(trial: Trial, base: Trial) -> dict[str, Any]:
    names = ("tokens_per_second", "seconds_per_step", "memory_gib", "first_loss", "loss")
    medians = {name: trial.median(name) for name in names}
    repeats = [run.tokens_per_second for run in trial.runs]
    reason = trial.reason
    if trial.runs and not reason and trains_otherwise(trial, base):
        loss, yours = number(trial.median("first_loss")), number(base.median("first_loss"))
        reason = f"its first loss is {loss}, yours is {yours}: it changes training, so it is not recommended"
    return {"setting": trial.name, "changes": trial.changes, "outcome": trial.outcome, "reason": reason,
            "ratio": ratio(trial, base), "spread": trial.spread, **medians, "repeats": repeats}  # fmt: skip


def describe_run(trial: Trial) -> str:
    """The last run of a trial in one line."""
    if trial.outcome != "measured":
        return f"{trial.outcome}: {trial.reason}"
    run = trial.runs[-1]
    return (
        f"{run.tokens_per_second:,.0f} tokens/s, {run.seconds_per_step:.3f} s per step, memory {run.memory_gib:.2f} "
        f"GiB, loss {number(run.loss)}"
    )


def show(document: Mapping[str, Any]) -> None:
    """The table and the advice, on stdout."""
    rows = [document["base"], *document["variants"]]
    settings = ", ".join(f"{name}={as_argument(value)}" for name, value in document["base"]["settings"].items())
    report(clean(f"yours: {settings}"))
    report("")
    show_table(_HEADERS, [_cells(row) for row in rows], _EXPENDABLE)
    for row in rows:
        if row["reason"]:
            report(clean(f"{row['setting']}: {row['outcome']}: {row['reason']}").replace("\n", " "))
    report("")
    for line in conclusion(document):
        report(clean(line))


def _cells(row: Mapping[str, Any]) -> list[str]:
    if row["tokens_per_second"] is None:
        return [row["setting"], row["outcome"], *"-----"]
    times = "-" if row["ratio"] is None else f"{row['ratio']:.2f}x"
    losses = f"{number(row['first_loss'])} to {number(row['loss'])}"
    numbers = (number(row["seconds_per_step"], 3), number(row["memory_gib"], 2), losses)
    apart = f"{row['spread']:.1%}" if len(row["repeats"]) > 1 else "-"
    return [row["setting"], f"{row['tokens_per_second']:,.0f}", times, apart, *numbers]


def conclusion(document: Mapping[str, Any]) -> list[str]:
    """The closing lines: the noise and the advice."""
    base, apart = document["base"], document["noise"]
    lines = ["interrupted: the rows above were measured so far"] if document["interrupted"] else []
    if not base["repeats"] and not document["interrupted"]:
        lines.append(f"your settings could not be measured: {base['outcome']}: {base['reason']}")
    if apart is not None:
        how = f"the noise is {apart:.1%}, the spread of {len(base['repeats'])} runs of your settings"
        lines.append(f"medians of runs of {document['steps']} steps after {document['warm_steps']}; {how}")
        if not any(line["for"] == "speed" for line in document["advice"]):
            least = max(apart, LEAST_GAIN)
            lines.append(f"your settings are already good: no change reliably gains more than {least:.1%} tokens/s")
    return [*lines, *(line["text"] for line in document["advice"])]
