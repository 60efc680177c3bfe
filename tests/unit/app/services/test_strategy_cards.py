"""The strategies in order of fit: which can run, what the planner says of them, and that counts do not pile up."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from app.hardware import Devices, Gpu
from app.plan.estimate import Row
from app.plan.hardware import GIB
from app.services import strategy_cards as service
from app.services.form import preview
from app.services.strategy_cards import StrategyCards, register_job, strategy_cards
from trainers.config.mistakes import ConfigError
from trainers.strategy.mesh import MeshSizes
from trainers.strategy.strategy import strategy_names
from ui.pages.strategy_parts import _speed


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_ESTIMATES", service._Estimates())


def key_of(processes: int = 2, default: str = "ddp", **options: Any) -> str:
    job = preview(options, "tiny-lora", None, None, str(processes)).job
    assert job
    return register_job(job.config, job.devices, default)


def row(name: str, seconds: float, gib: float = 1.0, sent: float = 0.0, **values: Any) -> Row:
    return Row(name, MeshSizes(), 8, {"weights": gib * GIB}, fits=True, seconds=seconds, sent=sent, **values)


def cards_with(monkeypatch: pytest.MonkeyPatch, rows: list[Row] | Exception, **options: Any) -> StrategyCards:
    """The cards once the planner has given these rows."""

    def plan(request: Any) -> list[Row]:
        if isinstance(rows, Exception):
            raise rows
        return rows

    monkeypatch.setattr(service, "_plan", plan)
    key = key_of(**options)
    strategy_cards(key, estimate=True)
    finish(key)
    cards = strategy_cards(key)
    assert cards
    return cards


def finish(key: str) -> None:
    """Waits for the estimate of a key."""
    while working := [thread for thread in threading.enumerate() if thread.name.endswith("(_work)")]:
        working[0].join(30)
    assert service._ESTIMATES.result(key) is not None


def test_every_strategy_has_a_card_at_once_and_a_title_in_words() -> None:
    cards = strategy_cards(key_of())
    assert cards
    assert cards.state == "counting"
    assert {card.name for card in (*cards.able, *cards.unable)} == set(strategy_names())
    assert cards.able[0].name == "ddp"
    for card in (*cards.able, *cards.unable):
        assert 3 < len(card.title) <= 36, card
        assert card.summary[0].isupper(), card
        assert card.summary[-1] == ".", card
    reasons = {card.name: card.reason for card in cards.unable}
    assert reasons["single"] == "runs on 1 process; 2 chosen"
    assert reasons["hsdp"] == "runs on 4 processes; 2 chosen"
    assert "accelerator" in reasons["fsdp2_offload"]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_what_is_said_to_run_is_accepted_by_the_form_and_the_rest_is_refused(processes: int) -> None:
    cards = strategy_cards(key_of(processes))
    assert cards
    for card in (*cards.able, *cards.unable):
        refused = preview({}, "tiny-lora", card.name, None, str(processes)).errors
        assert bool(refused) == (card in cards.unable), (card, refused)


def test_the_best_that_fits_comes_first_and_the_default_wins_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("tp", 1.0, sent=9), row("fsdp2", 1.01, sent=5), row("ddp", 1.015, sent=7), row("cp", 2.0)]
    cards = cards_with(monkeypatch, rows)
    assert [card.name for card in cards.able] == ["ddp", "fsdp2", "tp", "cp"]
    assert cards.recommended == "ddp"
    assert cards.able[-1].speed == 0.5
    assert "no other that fits is more than 5% faster" in cards.why
    slow = [row("tp", 1.0), row("ddp", 1.5)]
    assert cards_with(monkeypatch, slow, max_length="64").recommended == "tp", "a default that is slower is not better"


def test_what_is_recommended_is_as_fast_as_its_sentence_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner puts the least memory first among times within 5 %; a default beyond them stays behind them."""
    rows = [row("fsdp2", 1.04, gib=1), row("tp", 1.0, gib=2), row("ddp", 1.055, gib=3)]
    cards = cards_with(monkeypatch, rows)
    assert cards.recommended == "fsdp2"
    facts = {card.name: _speed(card) for card in cards.able}
    assert facts == {"fsdp2": "fastest", "tp": "fastest", "ddp": "95% of the fastest"}


def test_offloading_is_not_compared_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    offloading = [row("zero3_offload", 1.0, host=GIB), row("fsdp2_offload", 1.0, host=GIB)]
    cards = cards_with(monkeypatch, [row("ddp", 2.0), *offloading])
    assert "nothing else fits without offloading" in cards.why
    assert ", and nothing fits without offloading" in cards_with(monkeypatch, offloading, max_length="64").why


def test_nothing_is_recommended_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    large = row("ddp", 1.0, gib=900, reason="900.0 GiB for 5.0 usable")
    large.fits = False
    cards = cards_with(monkeypatch, [large])
    assert cards.recommended == ""
    assert "Nothing fits" in cards.why
    assert "as each strategy's file divides the work" in cards.why, "the planner may find another mesh"
    assert cards.able[0].reason.startswith("900.0 GiB")


def test_the_time_of_offloading_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = cards_with(monkeypatch, [row("ddp", 1.0), row("zero3_offload", 1.0)])
    assert {card.name: card.speed for card in cards.able} == {"ddp": 1.0, "zero3_offload": None}


def test_an_estimate_that_fails_says_why_and_keeps_the_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = cards_with(monkeypatch, ConfigError("model x is not here"))
    assert (cards.state, cards.recommended, cards.able[0].name) == ("unknown", "", "ddp")
    assert "model x is not here" in cards.why


@pytest.mark.parametrize("error", [RuntimeError("crashed"), ZeroDivisionError(), SystemExit(1)])
def test_after_any_failure_the_next_job_is_estimated(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def fail(request: Any) -> list[Row]:
        raise error

    monkeypatch.setattr(service, "_plan", fail)
    key = key_of()
    strategy_cards(key, estimate=True)
    finish(key)
    cards = strategy_cards(key)
    assert cards
    assert cards.state == "unknown"
    assert cards_with(monkeypatch, [row("ddp", 1.0)], max_length="64").state == "estimated"


def test_a_failure_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    def state(estimate: bool = False) -> str:
        cards = strategy_cards(key, estimate)
        assert cards
        return cards.state

    key = key_of()
    assert cards_with(monkeypatch, ConfigError("Hub unreachable")).state == "unknown"
    monkeypatch.setattr(service, "_plan", lambda request: [row("ddp", 1.0)])
    assert state(estimate=True) == "unknown", "not at once, or every look counts a model again"
    monkeypatch.setattr(service, "_FAILURE_SECONDS", 0.0)
    assert state() == "counting"
    state(estimate=True)
    finish(key)
    assert state() == "estimated", "and that is kept"


@pytest.mark.parametrize(
    ("processes", "name", "reason"),
    [(3, "cp", "runs on 2 processes; 3 chosen"), (5, "ddp", "runs on 4 processes; 5 chosen")],
)
def test_the_nearest_smaller_count_is_named_first(processes: int, name: str, reason: str) -> None:
    job = preview({}, "tiny-lora", None, None, "1").job
    assert job
    cards = strategy_cards(register_job(job.config, Devices([], processes), "ddp"))
    assert cards
    assert {card.name: card.reason for card in cards.unable}[name] == reason


def test_options_without_effect_on_memory_and_speed_share_an_estimate() -> None:
    assert key_of() == key_of(learning_rate="1e-5", run_name="x", max_steps="7", seed="3")
    assert len({key_of(), key_of(max_length="64"), key_of(1), key_of(default="fsdp2"), key_of(lora_r="4")}) == 5


@pytest.mark.long
def test_the_bars_count_a_teacher() -> None:
    """Under ddp, the frozen copy of an equal model is as large as the weights that are trained."""
    weights = []
    for options in ({}, {"objective": "distill", "teacher": "embedded"}):
        key = key_of(method="full", **options)
        strategy_cards(key, estimate=True)
        finish(key)
        cards = strategy_cards(key)
        assert cards
        weights += [card.memory["weights"] for card in cards.able if card.name == "ddp" and card.memory]
    alone, taught = weights
    assert taught == pytest.approx(2 * alone)


def test_counts_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is counted, only the newest request waits; one that was passed over is counted when asked for again."""
    counted: list[int] = []
    go, started = threading.Event(), threading.Event()

    def plan(request: Any) -> list[Row]:
        counted.append(request.config.max_length)
        started.set()
        assert go.wait(30)
        return [row("ddp", 1.0)]

    monkeypatch.setattr(service, "_plan", plan)
    keys = [key_of(max_length=str(length)) for length in (64, 65, 66, 67)]
    strategy_cards(keys[0], estimate=True)
    assert started.wait(30)
    for key in (*keys[1:], keys[0], keys[3]):
        strategy_cards(key, estimate=True)
    go.set()
    finish(keys[3])
    assert counted == [64, 67]
    strategy_cards(keys[1], estimate=True)
    finish(keys[1])
    assert counted == [64, 67, 65]


def test_the_planner_is_asked_about_what_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def refuse(config: Any, hardware: Any, able: Any) -> Any:
        asked.append([strategy.name for strategy, _ in able])
        raise ConfigError("stop here")

    monkeypatch.setattr(service, "count", refuse)
    key = key_of()
    cards = strategy_cards(key, estimate=True)
    finish(key)
    assert cards
    assert sorted(asked[0]) == sorted(card.name for card in cards.able)


def test_gpus_are_named_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(0, "GPU-0", "H100", 80 * GIB, 79 * GIB), Gpu(1, "GPU-1", "L4", 24 * GIB, 24 * GIB)]
    monkeypatch.setattr(service, "find_gpus", lambda: gpus)
    job = preview({}, "tiny-lora").job
    assert job
    cards = strategy_cards(register_job(job.config, Devices([0, 1], 2), "ddp"))
    assert cards
    assert (cards.unit, cards.memory) == ("GPU", 24 * GIB)
    reasons = {card.name: card.reason for card in cards.unable}
    assert "runs on" not in reasons["hsdp"], "four GPUs are not here"
    assert reasons["single"] == "runs on 1 GPU; 2 chosen"


def test_a_key_that_is_not_known_gives_nothing() -> None:
    assert strategy_cards("x" * 24, estimate=True) is None
