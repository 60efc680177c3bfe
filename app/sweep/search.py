"""Chooses the points of a sweep: every one of a grid, random ones, or those that TPE proposes from the results so far.

A proposal is a function of seed, number and results alone: optuna's study is built anew from the sweep's record each
time, so that there is no second record to lose or to keep in step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from app.sweep.space import Axis
from trainers.config.mistakes import ConfigError

METHODS = ("grid", "random", "tpe")
_TRIES = 50
"""Draws after which every point of the space is taken to be known."""
_DIGITS = 5


class Result(NamedTuple):
    """A trial as the search sees it.

    Attributes:
        values: the value of each option.
        score: what was measured; None while it runs.
        failed: whether it ended without a measurement.
    """

    values: dict[str, str]
    score: float | None = None
    failed: bool = False


def need_optuna() -> Any:
    """The optuna module.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        import optuna
    except ImportError:
        remedy = "install it with `pip install 'tunesmith[sweep]'`, or leave --search out for a grid"
        raise ConfigError(f"--search random and tpe need optuna, which is not installed; {remedy}") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def propose(
    axes: Sequence[Axis], method: str, seed: int, number: int, results: Sequence[Result], better: str, trials: int
) -> dict[str, str] | None:
    """The values of trial `number`; None if every point of the space is among the results.

    Args:
        axes: what varies.
        method: `random` or `tpe`.
        seed: seed of the search.
        number: number of the trial, from 0.
        results: the trials so far.
        better: `low` or `high`.
        trials: number of trials in all, of which TPE draws the first third at random.
    """
    optuna = need_optuna()
    known = [result.values for result in results]
    spaces = {axis.option: _distribution(optuna, axis) for axis in axes}
    for draw in range(_TRIES):
        # A draw that repeats a known point is followed by a random one: TPE would repeat itself.
        own_seed = (seed * 1_000_003 + number * _TRIES + draw) % 2**32
        if method == "random" or draw:
            sampler = optuna.samplers.RandomSampler(seed=own_seed)
        else:
            first = max(4, min(10, trials // 3))
            sampler = optuna.samplers.TPESampler(seed=own_seed, constant_liar=True, n_startup_trials=first)
        direction = "minimize" if better == "low" else "maximize"
        study = optuna.create_study(direction=direction, sampler=sampler)
        if method == "tpe":
            study.add_trials([_past(optuna, spaces, axes, result) for result in results])
        params = study.ask(spaces).params
        values = {axis.option: _text(axis, params[axis.option]) for axis in axes}
        if values not in known:
            return values
    return None


def _distribution(optuna: Any, axis: Axis) -> Any:
    if axis.values:
        return optuna.distributions.CategoricalDistribution(axis.values)
    if axis.integer:
        return optuna.distributions.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return optuna.distributions.FloatDistribution(float(axis.low), float(axis.high), log=axis.log)


def _past(optuna: Any, spaces: dict[str, Any], axes: Sequence[Axis], result: Result) -> Any:
    states = optuna.trial.TrialState
    state = states.FAIL if result.failed else states.RUNNING if result.score is None else states.COMPLETE
    params = {axis.option: _value(axis, result.values[axis.option]) for axis in axes}
    value = result.score if state == states.COMPLETE else None
    return optuna.trial.create_trial(state=state, params=params, distributions=spaces, value=value)


def _value(axis: Axis, text: str) -> Any:
    return text if axis.values else int(text) if axis.integer else float(text)


def _text(axis: Axis, value: Any) -> str:
    """A proposed value as on the command line: short, and within the range in spite of rounding."""
    if axis.values or axis.integer:
        return str(value)
    text = f"{value:.{_DIGITS}g}"
    if float(text) < float(axis.low):
        return axis.low
    return axis.high if float(text) > float(axis.high) else text
