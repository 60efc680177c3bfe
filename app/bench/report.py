"""What `tunesmith bench` makes of its measurements: the advice, the document, the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.bench.plan import SETTINGS, WARM, Plan, Trial
from app.console import clean, number, report, show_table
from app.launch.job import told

LEAST_GAIN = 0.03
"""Share of the tokens per second below which a gain is not worth a change, however quiet the machine."""
LEAST_SAVING = 0.1
"""Share of the memory likewise."""
SAME_LOSS = 0.01
"""Largest relative difference of the first step's loss from that with the user's settings; rounding is far below."""
_LOSS = "loss, first to last"
_HEADERS = ("setting", "tokens/s", "against yours", "runs apart", "s/step", "memory GiB", _LOSS)
_EXPENDABLE = (_LOSS, "runs apart", "s/step", "memory GiB")


# -- the arithmetic --------------------------------------------------------------------------------------------------


def ratio(one: Trial, base: Trial, what: str = "tokens_per_second") -> float | None:
    """A median of one trial over that of the user's settings; None where there is none."""
    mine, yours = one.median(what), base.median(what)
    return None if mine is None or not yours else mine / yours


def noise(one: Trial, base: Trial) -> float:
    """What a gain must exceed: how far the runs of either are apart, and never less than `LEAST_GAIN`."""
    return max(base.spread, one.spread, LEAST_GAIN)


def trains_otherwise(one: Trial, base: Trial) -> bool:
    """Whether the loss is another one, where it must be the same; `packing` alone may change it."""
    mine, yours = one.median("first_loss"), base.median("first_loss")
    if "packing" in one.changes or yours is None:
        return False
    return mine is None or abs(mine - yours) > SAME_LOSS * abs(yours)


def helps(one: Trial, base: Trial) -> bool:
    """Whether the change gains more than the noise; a single run of either tells nothing of that."""
    gain = ratio(one, base)
    repeated = min(len(one.runs), len(base.runs)) > 1 and one.outcome == "measured"
    return repeated and gain is not None and gain - 1 > noise(one, base) and not trains_otherwise(one, base)


def helpful(base: Trial, variants: Sequence[Trial]) -> list[Trial]:
    """The variants that help, the fastest first; of several values of one option the fastest alone."""
    found = sorted((one for one in variants if helps(one, base)), key=_rate, reverse=True)
    best: dict[tuple[str, ...], Trial] = {}
    for one in found:
        best.setdefault(tuple(one.changes), one)
    return list(best.values())


def _rate(one: Trial) -> float:
    return one.median("tokens_per_second") or 0.0


def advice(base: Trial, variants: Sequence[Trial], combined: Trial | None) -> list[dict[str, Any]]:
    """What to change, the largest gain first; then what saves most memory. Nothing when nothing helps."""
    if not base.runs:
        fits = sorted((one for one in variants if one.outcome == "measured"), key=_rate, reverse=True)
        return [_entry(one, base, "fit", _fits(one)) for one in fits[:1]]
    faster = helpful(base, variants)
    if combined and helps(combined, base):
        faster = sorted([combined, *faster], key=_rate, reverse=True)
    lines = [
        _entry(one, base, "speed", f"{'or' if place else 'use'} {one.flags}: {_numbers(one, base)}")
        for place, one in enumerate(faster)
    ]
    saving = [one for one in variants if one not in faster and _saves(one, base)]
    least = min(saving, key=lambda one: one.median("memory_gib") or 0.0, default=None)
    text = f"if memory is short, {least.flags}: {_numbers(least, base)}" if least else ""
    return [*lines, *([_entry(least, base, "memory", text)] if least else [])]


def _saves(one: Trial, base: Trial) -> bool:
    share = ratio(one, base, "memory_gib")
    same = "packing" not in one.changes and not trains_otherwise(one, base)
    return same and one.outcome == "measured" and share is not None and share < 1 - LEAST_SAVING


def _numbers(one: Trial, base: Trial) -> str:
    memory = f"memory {number(base.median('memory_gib'), 2)} -> {number(one.median('memory_gib'), 2)} GiB"
    text = f"{number(ratio(one, base), 2)}x tokens/s, {memory}"
    if "packing" not in one.changes:
        return text
    before, after = (round(_rate(each) * (each.median("seconds_per_step") or 0.0)) for each in (base, one))
    return f"{text}; it changes which rows make a step: {after:,} tokens in place of {before:,}"


def _fits(one: Trial) -> str:
    rate, memory = number(one.median("tokens_per_second"), 0), number(one.median("memory_gib"), 2)
    return f"use {one.flags}, with which it fits: {rate} tokens/s, memory {memory} GiB"


def _entry(one: Trial, base: Trial, goal: str, text: str) -> dict[str, Any]:
    return {"options": one.changes, "ratio": ratio(one, base), "memory_gib": one.median("memory_gib"), "for": goal,
            "text": text}  # fmt: skip


# -- the document ----------------------------------------------------------------------------------------------------


def document_of(plan: Plan, combined: Trial | None, steps: int | None) -> dict[str, Any]:
    """The report as plain values.

    Args:
        plan: its trials have run.
        combined: all that help, at once.
        steps: that were timed; None when no run came so far.
    """
    base, job = plan.base, plan.job
    tried = [*plan.variants, *([combined] if combined else [])]
    settings = {name: getattr(job.config, name) for name in SETTINGS}
    return {
        "base": {**_numbers_of(base, base), "settings": settings},
        "variants": [_numbers_of(one, base) for one in tried],
        "advice": advice(base, plan.variants, combined),
        "noise": base.spread if len(base.runs) > 1 else None, "steps": steps, "warm_steps": WARM, "turns": plan.turns,
        "strategy": job.strategy.name, "world_size": job.devices.num_processes, "method": job.config.method,
        "global_batch_size": job.config.global_batch_size,
    }  # fmt: skip


def _numbers_of(one: Trial, base: Trial) -> dict[str, Any]:
    names = ("tokens_per_second", "seconds_per_step", "memory_gib", "first_loss", "loss")
    medians = {name: one.median(name) for name in names}
    repeats = [run.tokens_per_second for run in one.runs]
    reason = one.reason
    if one.runs and not reason and trains_otherwise(one, base):
        loss, yours = number(one.median("first_loss")), number(base.median("first_loss"))
        reason = f"its first loss is {loss}, yours {yours}: it does not train the same, and is not advised"
    return {"setting": one.name, "changes": one.changes, "outcome": one.outcome, "reason": reason,
            "ratio": ratio(one, base), "spread": one.spread, **medians, "repeats": repeats}  # fmt: skip


def told_run(one: Trial) -> str:
    """The last run of a trial in one line."""
    if one.outcome != "measured":
        return f"{one.outcome}: {one.reason}"
    run = one.runs[-1]
    return (
        f"{run.tokens_per_second:,.0f} tokens/s, {run.seconds_per_step:.3f} s per step, memory {run.memory_gib:.2f} "
        f"GiB, loss {number(run.loss)}"
    )


def show(document: Mapping[str, Any]) -> None:
    """The table and the advice, on stdout."""
    rows = [document["base"], *document["variants"]]
    settings = ", ".join(f"{name}={told(value)}" for name, value in document["base"]["settings"].items())
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
    """What it all comes to."""
    base, apart = document["base"], document["noise"]
    lines = ["interrupted: the rows above are what was measured so far"] if document["interrupted"] else []
    if not base["repeats"] and not document["interrupted"]:
        lines.append(f"your settings could not be measured: {base['outcome']}: {base['reason']}")
    if apart is not None:
        how = f"{len(base['repeats'])} runs of your settings are {apart:.1%} apart, which is the noise"
        lines.append(f"medians of runs of {document['steps']} steps after {document['warm_steps']}; {how}")
        if not any(line["for"] == "speed" for line in document["advice"]):
            least = max(apart, LEAST_GAIN)
            lines.append(f"your settings are good already: no change is sure to gain more than {least:.1%} tokens/s")
    return [*lines, *(line["text"] for line in document["advice"])]
