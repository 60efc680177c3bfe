"""Curves from metrics: thinned with their extremes, in the order of steps and attempts, only what is new."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from app.runs import metrics
from app.runs.metrics import MAX_POINTS, Curves
from trainers.config.mix import MAX_SOURCES
from trainers.config.objectives import MOST_NAMES
from trainers.run.folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "a")
    made.create()
    return made


def add(run: RunFolder, *rows: Any) -> None:
    with open(run.metrics, "a", encoding="utf-8") as file:
        file.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def row(step: int, loss: float | None, attempt: int = 0, **more: Any) -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "loss": loss, "tokens": step * 10, "elapsed_s": step / 2, **more}


def whole(curves: Curves, run: RunFolder, since: str | None = None) -> dict[str, Any]:
    return curves.view(run, since, seconds=60)


def merge(kept: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    """What the browser does with an answer."""
    if fresh["full"]:
        return fresh
    stay = [step for step in kept["train"]["step"] if step < fresh["cut"]]
    steps = stay + fresh["train"]["step"]
    loss = {
        kind: kept["train"]["loss"][kind][: len(stay)] + fresh["train"]["loss"][kind] for kind in kept["train"]["loss"]
    }
    return {**fresh, "train": {"step": steps, "loss": loss}}


def test_few_rows_are_given_as_they_are(run: RunFolder) -> None:
    add(run, row(1, 2.0, learning_rate=0.1), row(2, 1.5), {"step": 2, "attempt": 0, "eval_loss": 1.75})
    seen = whole(Curves(), run)
    assert seen["train"]["step"] == [1, 2]
    assert seen["train"]["loss"] == {"mean": [2.0, 1.5]}
    assert seen["train"]["learning_rate"] == {"mean": [0.1, None]}
    assert (seen["train"]["tokens"], seen["train"]["elapsed_s"]) == ([10, 20], [0.5, 1.0])
    assert seen["eval"] == {"step": [2], "tokens": [20], "elapsed_s": [1.0], "eval_loss": {"mean": [1.75]}}


def test_a_mixture_of_experts_has_a_curve_of_its_load_balancing(run: RunFolder) -> None:
    add(run, row(1, 2.0))
    assert "aux_loss" not in whole(Curves(), run)["train"], "another model has none"
    add(run, row(2, 1.5, aux_loss=1.02))
    assert whole(Curves(), run)["train"]["aux_loss"] == {"mean": [None, 1.02]}


def test_metrics_of_each_source_of_a_mix_are_curves(run: RunFolder) -> None:
    curves = Curves()
    add(run, {**row(1, 2.0), "loss/": 3.0, "odd/a": 3.0, "eval/loss/a": 1.0})
    assert whole(curves, run)["sources"] == []  # control: none of these is one
    add(run, {**row(2, 2.0), "loss/a-b": 3.0, "share/a-b": 0.75, "tokens/a-b": 8, "loss/c": 1.0},
        {"step": 2, "attempt": 0, "eval_loss": 1.0, "eval_loss/c": 4.0})  # fmt: skip
    seen = whole(curves, run)
    assert seen["sources"] == ["a-b", "c"]
    assert seen["train"]["loss/a-b"]["mean"] == [None, 3.0]
    assert seen["train"]["tokens/a-b"]["mean"] == [None, 8.0]
    assert seen["eval"]["eval_loss/c"]["mean"] == [4.0]
    add(run, {**row(3, 2.0), **{f"loss/source{number}": 1.0 for number in range(3 * MAX_SOURCES)}})
    assert len(whole(curves, run)["sources"]) == MAX_SOURCES, "a file of metrics cannot make charts without end"


def test_metrics_of_the_users_own_objective_are_curves_under_their_names(run: RunFolder) -> None:
    full_row = row(1, 2.0, epoch=0.1, eta_s=3, bubble=0.2, reward_margin=0.5, reward_of_a_file=1, a_by_rank=3)
    add(run, full_row, {"step": 1, "eval_loss": 1.75, "eval_reward_accuracy": 1, "exact": "no number"})
    curves = Curves()
    seen = whole(curves, run)
    assert seen["own"] == []  # control: none of these is one
    add(run, row(2, 1.5, gap=0.25), {"step": 2, "attempt": 0, "eval_loss": 1.5, "eval_gap": 0.75, "eval_gap-": 1})
    seen = whole(curves, run)
    assert seen["own"] == ["gap"]
    assert seen["train"]["gap"] == {"mean": [None, 0.25]}
    assert seen["eval"]["eval_gap"] == {"mean": [None, 0.75]}
    add(run, row(3, 1.5, **{f"n{number}": 1 for number in range(100)}))
    assert len(whole(curves, run)["own"]) == MOST_NAMES, "a file of metrics cannot make charts without end"


def test_lists_by_rank_are_curves_of_their_mean(run: RunFolder) -> None:
    add(run, row(1, 2.0, gpu_percent_by_rank=[90, None, 70], gpu_power_w_by_rank=[None, "x", True]),
        row(2, 1.9, gpu_percent_by_rank=[50], host_memory_gib_by_rank="7"))  # fmt: skip
    train = whole(Curves(), run)["train"]
    assert train["gpu_percent"]["mean"] == [80, 50]
    assert not {"gpu_power_w", "host_memory_gib", "memory_reserved_gib"} & set(train)


def test_steps_of_checkpoints_are_marked(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_CHECKPOINTS", 2)
    saves = [{"step": step, "attempt": 0, "checkpoint_bytes": 9} for step in (2, 4, 4, 6)]
    add(run, row(1, 2.0), *saves, row(7, 1.0))
    assert whole(Curves(), run)["checkpoints"] == [4, 6]


def test_every_chart_shows_a_metric_that_is_read() -> None:
    script = (Path(__file__).parents[4] / "ui" / "static" / "live_run.js").read_text(encoding="utf-8")
    shown = re.findall(r'\["(train|eval)", "(\w+)"', script)
    assert ("train", "aux_loss") in shown
    assert set(shown) <= {("train", name) for name in metrics.TRAIN} | {("eval", name) for name in metrics.EVAL}


def test_a_later_attempt_replaces_the_steps_that_it_repeats(run: RunFolder) -> None:
    add(run, *(row(step, 1.0) for step in range(1, 8)), {"step": 6, "attempt": 0, "eval_loss": 9.0})
    add(run, *(row(step, 2.0, attempt=1) for step in range(5, 10)))
    seen = whole(Curves(), run)
    assert seen["train"]["step"] == list(range(1, 10))
    assert seen["train"]["loss"]["mean"] == [1.0] * 4 + [2.0] * 5
    assert seen["replaced"] == [{"attempt": 0, "step": [5, 6, 7], "loss": [1.0] * 3}]
    assert seen["attempts"] == [(0, 1), (1, 5)]
    assert seen["eval"]["step"] == []


def test_the_order_of_the_file_does_not_matter(run: RunFolder, tmp_path: Path) -> None:
    rows = [row(step, step / 7) for step in range(1, 40)] + [row(step, step / 3, 1) for step in range(20, 60)]
    add(run, *rows)
    other = RunFolder(tmp_path / "b")
    other.create()
    random.Random(3).shuffle(rows)
    add(other, *rows)
    first, second = whole(Curves(), run), whole(Curves(), other)
    assert first["train"] == second["train"]
    assert first["train"]["step"] != [one["step"] for one in rows]


def test_spikes_survive_thinning(run: RunFolder) -> None:
    values = [1.0] * 20_000
    values[7_777], values[15_001] = 50.0, -3.0
    add(run, *(row(step + 1, value) for step, value in enumerate(values)))
    loss = whole(Curves(), run)["train"]["loss"]
    assert len(loss["mean"]) <= MAX_POINTS
    assert (max(loss["max"]), min(loss["min"])) == (50.0, -3.0)
    assert max(loss["mean"]) < 3


def test_only_what_is_new_is_sent_and_it_adds_up(run: RunFolder) -> None:
    curves, kept, sizes = Curves(), {}, []
    for upto in range(1, 3001, 37):
        add(run, *(row(step, (step * 7919 % 101) / 50) for step in range(max(1, upto - 36), upto + 1)))
        fresh = whole(curves, run, kept.get("token"))
        kept = merge(kept, fresh)
        sizes += [] if fresh["full"] else [len(json.dumps(fresh))]
    expected = whole(Curves(), run)
    assert kept["train"]["step"] == expected["train"]["step"]
    assert kept["train"]["loss"] == expected["train"]["loss"]
    assert max(sizes) < 8_000 < len(json.dumps(expected))


def test_nothing_new_is_almost_nothing(run: RunFolder) -> None:
    add(run, *(row(step, 1.0) for step in range(1, 5000)))
    curves = Curves()
    first = whole(curves, run)
    again = whole(curves, run, first["token"])
    assert again == {"token": first["token"], "rows": 4999, "more": False, "same": True}
    add(run, {"step": 4999, "attempt": 0, "eval_loss": 0.5})
    assert whole(curves, run, first["token"])["eval"]["step"] == [4999]


def test_a_new_attempt_sends_everything_again(run: RunFolder) -> None:
    add(run, row(1, 1.0), row(2, 1.0))
    curves = Curves()
    token = whole(curves, run)["token"]
    add(run, row(2, 5.0, attempt=1))
    seen = whole(curves, run, token)
    assert seen["full"]
    assert seen["train"]["loss"]["mean"] == [1.0, 5.0]


def test_half_a_row_waits_for_its_end(run: RunFolder) -> None:
    add(run, row(1, 1.0))
    text = json.dumps(row(2, 2.0))
    with open(run.metrics, "a") as file:
        file.write(text[:20])
    curves = Curves()
    assert whole(curves, run)["rows"] == 1
    with open(run.metrics, "a") as file:
        file.write(text[20:] + "\n")
    assert whole(curves, run)["train"]["loss"]["mean"] == [1.0, 2.0]


def test_a_file_that_was_replaced_is_read_anew(run: RunFolder) -> None:
    add(run, row(1, 1.0), row(2, 1.0))
    curves = Curves()
    token = whole(curves, run)["token"]
    run.metrics.unlink()
    add(run, row(1, 7.0))
    seen = whole(curves, run, token)
    assert (seen["full"], seen["train"]["loss"]["mean"]) == (True, [7.0])


def test_what_json_and_charts_have_no_word_for_is_missing(run: RunFolder) -> None:
    add(run, row(1, None), '{"step": 2, "attempt": 0, "loss": NaN, "grad_norm": Infinity}', row(3, 1.0),
        '{"step": 4, "attempt": 0, "loss": 1e999, "grad_norm": "x"}', row(5, 10**400), row(6, True))  # fmt: skip
    seen = whole(Curves(), run)
    assert json.loads(json.dumps(seen, allow_nan=False))["train"]["loss"]["mean"] == [None, None, 1.0, None, None, None]
    assert "grad_norm" not in seen["train"]


@pytest.mark.parametrize(
    "line", ["[1]", "{", "null", '{"step": "1"}', '{"step": -1}', '{"step": 1e9}', '{"step": 99999999999999999999}',
             '{"step": true, "loss": 1}', "[" * 50_000, "\0\0"]
)  # fmt: skip
def test_what_is_no_row_is_left_out(run: RunFolder, line: str) -> None:
    add(run, row(1, 1.0), line, row(2, 2.0))
    assert whole(Curves(), run)["train"]["loss"]["mean"] == [1.0, 2.0]


def test_an_endless_line_is_skipped(run: RunFolder) -> None:
    with open(run.metrics, "w") as file:
        file.write("x" * (2 * metrics._MAX_ROW_BYTES + 17) + "\n")
    add(run, row(1, 1.0))
    assert whole(Curves(), run)["train"]["loss"]["mean"] == [1.0]


def test_a_large_file_is_read_in_several_calls_and_its_newest_values_are_known_at_once(run: RunFolder) -> None:
    add(run, *(row(step, float(step)) for step in range(1, 20_001)))
    curves = Curves()
    first = curves.view(run, seconds=0.001)
    assert first["more"]
    assert curves.latest(run, seconds=0.0)["loss"] == 20_000.0
    while (last := curves.view(run, seconds=0.001))["more"]:
        pass
    assert last["rows"] == 20_000
    assert last["train"]["step"][-1] == 20_000


def test_the_cache_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_MAX_CACHED_ROWS", 25)
    curves = Curves()
    for name in "abcdef":
        made = RunFolder(tmp_path / name)
        made.create()
        add(made, *(row(step, 1.0) for step in range(10)))
        whole(curves, made)
    assert len(curves.files) <= 4
    assert tmp_path / "f" in curves.files


@pytest.mark.parametrize("since", ["x", 7, ["a"], "1.2.3.4.5", "\0", "9" * 5000, {"a": 1}])
def test_a_strange_token_gets_everything(run: RunFolder, since: object) -> None:
    add(run, row(1, 1.0))
    assert Curves().view(run, since)["full"]


def test_no_metrics_are_no_curves(run: RunFolder) -> None:
    seen = whole(Curves(), run)
    assert (seen["rows"], seen["train"], seen["eval"], seen["more"]) == (0, {"step": []}, {"step": []}, False)
