"""Why a run failed or trains badly: the cause in one sentence, what shows it, and changes that may help."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import TYPE_CHECKING, Any

from app.console import clean, shortened
from app.diagnosis import facts as read
from app.diagnosis.facts import Metrics
from app.diagnosis.plan import Fits, Plan, plan_of, unknown_fit
from app.diagnosis.rules import CONSEQUENCES, RULES, Facts, Remedy, Rule
from app.runs.log import Line
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder

if TYPE_CHECKING:
    from app.runs.metrics import Curves

_MAX_EVIDENCE = 4
_MAX_TEXT = 300
_FORMATTER = Formatter()


@dataclass(frozen=True)
class Evidence:
    """Something that shows a cause.

    Args:
        text: a line of the log, or what the numbers say.
        rank: rank that wrote it, or that it is about; None if none.
        step: step that it is about; None if unknown.
    """

    text: str
    rank: int | None = None
    step: int | None = None


@dataclass(frozen=True)
class Change:
    """A remedy for this run.

    Args:
        number: number by which it is applied, from 1.
        text: what it does.
        options: new values of training options.
        launch: new values of launch options, such as `strategy`.
        force: whether the remaining steps are not those that the checkpoint would have led to.
    """

    number: int
    text: str
    options: dict[str, str]
    launch: dict[str, str]
    force: bool

    @property
    def flags(self) -> str:
        """The options as on the command line."""
        flags = [f"--{name}={value}" for name, value in {**self.launch, **self.options}.items()]
        return shlex.join([*flags, *["--force"] * self.force])


@dataclass(frozen=True)
class Diagnosis:
    """A cause.

    Args:
        rule: its id; empty if no rule knows it.
        cause: one sentence.
        evidence: what shows it.
        remedies: changes that may help, the likeliest first.
        help: what to do besides, in one sentence; may be empty.
    """

    rule: str
    cause: str
    evidence: list[Evidence] = field(default_factory=list)
    remedies: list[Change] = field(default_factory=list)
    help: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "rule": self.rule or None,
            "cause": self.cause,
            "evidence": [vars(entry) for entry in self.evidence],
            "remedies": [vars(change) for change in self.remedies],
            "help": self.help or None,
        }


def diagnose(
    run: RunFolder, curves: Curves | None = None, fits: Fits = unknown_fit, seconds: float = 0.05
) -> list[Diagnosis]:
    """The causes for what is wrong with a run; empty if nothing is.

    Args:
        run: the run.
        curves: cache of its metrics; without one, all of them are read.
        fits: the planner.
        seconds: how long to read metrics for, with a cache.
    """
    from app.runs.metrics import Curves  # imports numpy

    state = read.read_state(run)
    metrics = read.read_metrics(run, curves or Curves(), seconds if curves else float("inf"))
    return advice(state, metrics, read.read_last_attempt(run, state), plan_of(run, state, fits))


def advice(state: Mapping[str, Any], metrics: Metrics, log: Sequence[Line], plan: Plan | None) -> list[Diagnosis]:
    """The causes for what is wrong with a run; empty if nothing is.

    Args:
        state: the true state, with the keys that `app.diagnosis.facts.read_state` adds.
        metrics: its numbers.
        log: the lines of its last attempt.
        plan: its request; None if that cannot be read.
    """
    if state.get("state") == "failed":
        matches = [_cause_of_failure(state, metrics, log, plan)]
    else:
        matches = list(_trends(metrics, log, plan)) if state.get("state") in ("running", "stopped", "done") else []
    number, diagnoses = 1, []
    for rule, facts, lines in matches:
        facts = _with_defaults(facts, state, plan)
        remedies = _changes(rule.remedies, facts, plan, number)
        number += len(remedies)
        evidence = [*_notes(rule, facts, state), *(_quote(line) for line in lines)][:_MAX_EVIDENCE]
        diagnoses.append(
            Diagnosis(rule.id, _sentence(rule.cause, facts), evidence, remedies, _sentence(rule.help, facts))
        )
    return diagnoses


Match = tuple[Rule, Facts, list[Line]]


def _cause_of_failure(state: Mapping[str, Any], metrics: Metrics, log: Sequence[Line], plan: Plan | None) -> Match:
    """The rule that knows the cause of a failed run; a rule without id says what is recorded."""
    text, rank = read.split_cause(state.get("cause"))
    rule, facts = _first_match(text, metrics, plan)
    if rule.id in CONSEQUENCES:
        for better in (rule for rule in RULES if rule.log and not rule.always and _holds(rule, metrics, plan)):
            lines = _matching(better.log, log)
            if match := re.match(better.log, read.message(lines[0])) if lines else None:
                rank = lines[0].writer if lines[0].writer.isdigit() else rank
                return better, {"rank": rank, **_groups(match)}, [*lines[:2], *_shown_by(better, log)]
    facts = {"rank": rank, "text": text, **facts}
    return rule, facts, _shown_by(rule, log) or _last_errors(log, str(facts["rank"]))


def _first_match(text: str, metrics: Metrics, plan: Plan | None) -> tuple[Rule, Facts]:
    for rule in RULES:
        match = re.match(rule.pattern, text, re.DOTALL) if rule.pattern else None
        if match and _holds(rule, metrics, plan):
            return rule, _groups(match)
    return Rule("", "{text}", help="The last error in the log says more."), {}


def _holds(rule: Rule, metrics: Metrics, plan: Plan | None) -> bool:
    """Whether the further condition of a rule holds."""
    return rule.when is None or (plan is not None and bool(_computed(rule.when, metrics, plan)))


def _computed(function: Callable[..., Any], *values: Any) -> Any:
    """What a function of a rule answers; None where the run's numbers are too damaged for it."""
    try:
        return function(*values)
    except (ArithmeticError, ValueError):
        return None


def _groups(match: re.Match[str]) -> Facts:
    """The groups of a match; those of alternatives, such as `where2`, under the name of the first."""
    return {name.rstrip("0123456789"): value.strip() for name, value in match.groupdict().items() if value}


def _trends(metrics: Metrics, log: Sequence[Line], plan: Plan | None) -> Iterator[Match]:
    """The rules that know what is wrong with a run that did not fail."""
    for rule in RULES:
        if rule.always:
            if lines := [line for line in _matching(rule.log, log) if line.writer == "0"]:
                match = re.match(rule.log, read.message(lines[0]))
                yield rule, _groups(match) if match else {}, lines[:1]
        elif rule.trend and plan is not None and (facts := _computed(rule.trend, metrics, plan)) is not None:
            yield rule, facts, _shown_by(rule, log)


def _matching(pattern: str, log: Sequence[Line]) -> list[Line]:
    """The lines of ranks and launcher that match."""
    return [line for line in log if line.writer != "supervisor" and re.match(pattern, read.message(line))]


def _shown_by(rule: Rule, log: Sequence[Line]) -> list[Line]:
    return _matching(rule.evidence, log)[-_MAX_EVIDENCE:] if rule.evidence else []


_SAYS_NOTHING = ("Traceback", ' File "', "subprocess.CalledProcessError: Command ")
"""Signs of lines in red that name no error: of a trace, and of the launcher, which repeats its command."""


def _last_errors(log: Sequence[Line], rank: str) -> list[Line]:
    """The last lines that report an error, of the rank that failed if it is known."""
    errors = [line for line in log if line.error and not any(sign in line.text for sign in _SAYS_NOTHING)]
    own = [line for line in errors if line.writer == rank]
    return (own or errors)[-2:]


def _with_defaults(facts: Facts, state: Mapping[str, Any], plan: Plan | None) -> Facts:
    """The facts that sentences and values may name, empty where unknown."""
    note = _mapping(state.get("out_of_memory"))
    rank = str(facts.get("rank") or note.get("rank", ""))
    if not rank and plan is not None and plan.strategy.num_processes == 1:
        rank = "0"
    beat = _mapping(_mapping(state.get("heartbeats")).get(_number(rank)))
    section, step = note.get("section") or beat.get("section"), _number(str(beat.get("step")))
    evaluates = section == "evaluation"
    at = f" {'after' if evaluates else 'of'} step {step + (not evaluates)}" if step is not None else ""
    doing = f" in {section}{at}" if section in _SECTIONS else ""
    common: Facts = {
        "who": f"Rank {rank}" if rank else "A rank", "who_lower": f"rank {rank}" if rank else "a rank",
        "doing": doing, "evaluates": evaluates, "config": plan.config if plan else None,
        "used_strategy": plan.strategy.name if plan else "",
    }  # fmt: skip
    return {**common, **facts, "rank": rank}


def _mapping(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


_SECTIONS = ("start", "reference", "data", "forward", "backward", "all-reduce", "step", "save", "evaluation", "export")


def _changes(remedies: Sequence[Remedy], facts: Facts, plan: Plan | None, first: int) -> list[Change]:
    """The remedies that would change something and could be applied, numbered from `first`."""
    changes: list[Change] = []
    if plan is None:
        return []
    for remedy in remedies:
        options = _values(remedy.options, plan, facts)
        launch = _values(remedy.launch, plan, facts)
        if options is None or launch is None or (changed := plan.changed(options, launch)) is None:
            continue
        force = changed[1] or options.pop("force_resume", "") == "true"
        text = _sentence(remedy.text, {**facts, **options, **launch})
        changes.append(Change(first + len(changes), text, options, launch, force))
    return changes


def _values(values: Mapping[str, Any], plan: Plan, facts: Facts) -> dict[str, str] | None:
    """The new values of options; None if one of them does not apply."""
    computed = {
        name: _sentence(value, facts) if isinstance(value, str) else _computed(value, plan, facts)
        for name, value in values.items()
    }
    return None if None in computed.values() else computed


def _sentence(template: str, facts: Facts) -> str:
    """A template with its facts; an unknown one, and what then surrounds it, is left out."""
    parts = []
    for literal, name, spec, _ in _FORMATTER.parse(template):
        parts.append(literal)
        if name is not None:
            try:
                value, _ = _FORMATTER.get_field(name, (), facts)
            except (KeyError, AttributeError):
                value = ""
            parts.append(format(value, spec or "") if value != "" else "")
    text = clean("".join(parts)).replace("\n", " ")
    return re.sub(r": \.$|, \.$| \(\)", lambda match: "." if match[0].endswith(".") else "", text)


def _notes(rule: Rule, facts: Facts, state: Mapping[str, Any]) -> list[Evidence]:
    """The recorded cause of a failure, or the numbers that show a trend."""
    step = str(facts.get("step") or state.get("step") or "")
    at = _number(step)
    if rule.trend:
        numbers = {name: value for name, value in facts.items() if name not in _COMMON and value not in ("", step)}
        return [_evidence("metrics: " + ", ".join(f"{name} {value}" for name, value in numbers.items()), None, at)]
    text, _ = read.split_cause(state.get("cause"))
    return [_evidence(text, _number(facts["rank"]), at)] if state.get("state") == "failed" and rule.id and text else []


_COMMON = ("who", "who_lower", "doing", "evaluates", "config", "used_strategy")


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,15}", text) else None


def _quote(line: Line) -> Evidence:
    return _evidence(line.text, _number(line.writer))


def _evidence(text: str, rank: int | None, step: int | None = None) -> Evidence:
    return Evidence(shortened(clean(text).replace("\n", " ").strip(), _MAX_TEXT), rank, step)


def remedy_of(diagnoses: Sequence[Diagnosis], number: object) -> Change:
    """The remedy with a number.

    Raises:
        ConfigError: if there is none.
    """
    changes = {str(change.number): change for diagnosis in diagnoses for change in diagnosis.remedies}
    if (change := changes.get(str(number))) is not None:
        return change
    if not changes:
        raise ConfigError(
            "--apply: there is no remedy for this run that changes an option; `tunesmith runs show` says why"
        )
    known = "1" if len(changes) == 1 else f"1 to {len(changes)}"
    raise ConfigError.about("--apply", shortened(str(number), 40), "is not the number of a remedy", f"use {known}")
