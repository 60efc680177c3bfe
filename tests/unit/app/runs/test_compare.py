"""Runs side by side: what differs, and which ended better."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli import run_verb
from app.runs.compare import MAX_RUNS, MEASURES, as_csv, beyond_spread, chosen_runs, compare, measure_texts
from app.runs.metrics import Curves
from tests.made_runs import made_run
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_settings_that_differ_are_told(tmp_path: Path) -> None:
    runs = [
        made_run(tmp_path, "a", strategy="ddp"),
        made_run(tmp_path, "b", strategy="fsdp2", config={"learning_rate": 1e-3, "seed": 7}),
    ]
    seen = compare(runs, Curves())
    different = {row["name"]: row["values"] for row in seen["settings"] if row["differs"]}
    assert set(different) == {"strategy", "learning_rate", "seed"}
    assert different["strategy"] == ["ddp", "fsdp2"]
    assert len(seen["settings"]) > 30
    assert not any(row["differs"] for row in compare(runs[:1] * 2, Curves())["settings"])


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.54952, 0.5545, None], ["0.54952", "0.55450", "-"]),
        ([13755.3, 986.21], ["13,755", "986"]),
        ([1.5, 1.48], ["1.50", "1.48"]),
        ([200, 600], ["200", "600"]),
        ([3e-7, 0.0], ["3e-07", "0"]),
        ([None], ["-"]),
    ],
)
def test_numbers_of_one_measure_have_as_many_decimals(values: list[float | None], texts: list[str]) -> None:
    assert measure_texts(values, MEASURES["loss"]) == texts


def test_a_measure_says_its_unit() -> None:
    assert measure_texts([1625.2, None], MEASURES["tokens_per_second"]) == ["1,625 tokens/s", "-"]
    assert measure_texts([0.6, 23.4, None], MEASURES["peak_memory"]) == ["614 MiB", "23.4 GiB", "-"]


def log(run: RunFolder, *rows: dict[str, Any]) -> RunFolder:
    run.metrics.write_text("".join(json.dumps({"attempt": 0, **row}) + "\n" for row in rows))
    return run


def evaluated(folder: Path, name: str, losses: Sequence[float], state: str = "done", **config: Any) -> RunFolder:
    run = made_run(folder, name, state, config=config)
    rows = ({"step": 10 * number, "eval_loss": loss} for number, loss in enumerate(losses, start=1))
    return log(run, *rows)


def verdict(*runs: RunFolder, by: str | None = None) -> str:
    return str(compare(runs, Curves(), by)["verdict"])


def test_the_best_is_named_with_its_step_and_how_it_was_picked(tmp_path: Path) -> None:
    rising, falling = evaluated(tmp_path, "rising", [0.2, 0.9]), evaluated(tmp_path, "falling", [0.8, 0.3])
    bare = log(made_run(tmp_path, "bare", "stopped"))
    assert verdict(rising, falling, bare) == (
        "rising leads in best evaluation loss: 0.2 at step 10 (the best of all evaluations; lower is better). "
        "Without a value: bare."
    )
    assert verdict(rising, falling, by="last_eval_loss").startswith("falling leads in last evaluation loss: 0.3")
    assert verdict(rising, evaluated(tmp_path, "twin", [0.2]), falling).startswith("rising and twin share first place")
    assert verdict(rising, rising) == "All are equal in best evaluation loss: 0.2."
    assert verdict(bare, falling) == "Only falling has a value for best evaluation loss: 0.3 at step 20."
    assert verdict(rising, evaluated(tmp_path, "same", [0.2000001])) == "All are equal in best evaluation loss: 0.2."
    assert verdict(bare, bare) == "No metrics yet."
    assert verdict(rising, falling, by="peak_memory") == "None of these runs has a value for peak memory."
    half = evaluated(tmp_path, "half", [0.1], "stopped")
    assert verdict(rising, half).endswith("Not finished: half.")
    other = evaluated(tmp_path, "other", [0.5], objective="dpo", dataset_name="embedded:preferences")
    assert verdict(rising, other).endswith(
        "different objectives (sft, dpo), whose losses say nothing about each other."
    )
    assert "objectives" not in verdict(rising, falling) + verdict(rising, other, by="tokens_per_second")
    for wrong in ("step", "nope", ""):
        with pytest.raises(ConfigError, match="is not a measure; use one of best_eval_loss"):
            compare([rising], Curves(), wrong)


def test_a_measure_ignores_what_a_resume_replaced_and_numbers_that_are_none(tmp_path: Path) -> None:
    run = made_run(tmp_path, "a")
    rows = [{"step": 1, "eval_loss": 5.0}, {"step": 2, "eval_loss": 0.1}, {"step": 2, "eval_loss": 3.0, "attempt": 1}]
    log(run, *rows, {"step": 3, "eval_loss": math.nan, "attempt": 1}, {"step": 4, "eval_loss": "0", "attempt": 1})
    row = compare([run], Curves())["measures"][0]
    assert (row["name"], row["values"], row["steps"]) == ("best_eval_loss", [3.0], [2])


def test_each_kind_of_number_is_picked_its_own_way(tmp_path: Path) -> None:
    rows = [{"step": step, "tokens_per_second": speed, "memory_gib": memory, "tokens": 9 * step}
            for step, speed, memory in ((1, 1.0, 2.0), (2, 90.0, 7.0), (3, 100.0, 3.0))]  # fmt: skip
    seen = compare([log(made_run(tmp_path, "a"), *rows)], Curves())
    picked = {row["name"]: (row["values"], row["steps"]) for row in seen["measures"]}
    assert picked["tokens_per_second"] == ([90.0], [None])  # the first step, which compiles, does not count
    assert picked["peak_memory"] == ([7.0], [2])
    assert picked["tokens"] == ([27], [None])
    assert not any(row["best"] for row in seen["measures"])
    json.dumps(seen, allow_nan=False)


def test_runs_that_differ_in_the_seed_only_are_one_group(tmp_path: Path) -> None:
    runs = [evaluated(tmp_path, f"seed-{seed}", [loss], seed=seed) for seed, loss in ((1, 0.1), (2, 0.2), (3, 0.6))]
    faster = [evaluated(tmp_path, f"fast-{seed}", [0.5], seed=seed, learning_rate=1e-3) for seed in (1, 2)]
    (group,) = compare(runs, Curves())["groups"]
    assert group["seeds"] == [1, 2, 3]
    spread = group["values"]["best_eval_loss"]
    assert (spread["runs"], spread["min"], spread["max"]) == (3, 0.1, 0.6)
    assert spread["mean"] == pytest.approx(0.3)
    assert spread["std"] == pytest.approx(statistics.stdev([0.1, 0.2, 0.6]))
    groups = compare([*runs, *faster, evaluated(tmp_path, "alone", [0.5], seed=1, weight_decay=0.5)], Curves())[
        "groups"
    ]
    assert [group["seeds"] for group in groups] == [[1, 2, 3], [1, 2]]
    assert "learning_rate 0.001" in groups[1]["label"]
    assert compare([runs[0], evaluated(tmp_path, "again", [0.3], seed=1)], Curves())["groups"] == [], "the same seed"


def test_over_seeds_a_best_is_named_only_beyond_the_spread(tmp_path: Path) -> None:
    slow = [evaluated(tmp_path, f"slow-{seed}", [0.5 + 0.02 * seed], seed=seed) for seed in (1, 2)]
    fast = [evaluated(tmp_path, f"fast-{seed}", [0.3 + 0.1 * seed], seed=seed, lora_r=8) for seed in (1, 2)]
    assert "Over seeds, lora_r 8 is the best: every seed of it is better" in verdict(*slow, *fast)
    third = evaluated(tmp_path, "fast-3", [0.53], seed=3, lora_r=8)
    assert verdict(*slow, *fast, third).endswith("Over seeds, none is the best beyond the spread.")
    assert "Over seeds" not in verdict(*slow)
    assert beyond_spread([[1.0, 2.0], [3.0, 4.0]], "low") == 0
    assert beyond_spread([[1.0, 2.0], [3.0, 4.0]], "high") == 1
    assert beyond_spread([[1.0], [3.0, 4.0]], "low") is None, "one seed has no spread"
    assert beyond_spread([[1.0, 2.0], [2.0, 3.0]], "low") is None


def test_the_csv_has_no_formula_and_its_empty_cells_are_empty(tmp_path: Path) -> None:
    formulas = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", " =1", '=HYPERLINK("http://x","y")', "a,b\n=c"]
    runs = [made_run(tmp_path, f"run-{number}", "failed", config={"seed": number}) for number in range(len(formulas))]
    for run, formula in zip(runs, formulas, strict=True):
        run.config.write_text(yaml.safe_dump({"preset": formula, "seed": -5, "packing": True, "columns": ["=x"]}))
        run.metrics.unlink()
    log(runs[0], {"step": 3, "loss": -0.5})
    rows = list(csv.DictReader(io.StringIO(as_csv(compare(runs, Curves())), newline="")))
    assert [row["preset"] for row in rows] == [f"'{text}" for text in formulas[:-1]] + formulas[-1:]
    assert [row["loss"] for row in rows[:2]] == ["-0.5", ""]
    assert [rows[0][name] for name in ("run", "loss at step", "seed", "packing")] == ["run-0", "3", "-5", "true"]
    assert rows[0]["columns"] == '["=x"]'


def test_the_verb_compares_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, loss in (("a", 0.5), ("b", 0.25)):
        evaluated(tmp_path, name, [loss], seed=len(name + str(loss)))
    target = tmp_path / "out.csv"
    common = ["runs", "compare", "a", "b", "--runs_dir", str(tmp_path)]
    assert run_verb([*common, "--csv", str(target)]) == 0
    printed = capsys.readouterr().out
    assert "b leads in best evaluation loss: 0.25 at step 10" in printed
    assert "learning_rate" not in printed
    assert target.read_text().startswith("run,state,best_eval_loss,")
    assert run_verb([*common, "--all_options", "--by", "last_eval_loss", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["by"] == "last_eval_loss"
    for wrong in (["--by", "x"], ["--csv", str(tmp_path / "a" / "config.yaml")], ["--csv", "/nowhere/x.csv"]):
        assert run_verb([*common, *wrong]) == 2
        assert "error: " in capsys.readouterr().err
    assert (tmp_path / "a" / "config.yaml").read_text().startswith("preset")


def test_ids_are_taken_once_and_strange_ones_are_refused(tmp_path: Path) -> None:
    made_run(tmp_path, "a")
    made_run(tmp_path, "b")
    runs, refused = chosen_runs("b,a,b,,../a,/etc/passwd,gone", tmp_path)
    assert [run.id for run in runs] == ["b", "a"]
    assert len(refused) == 3
    assert chosen_runs(None, tmp_path) == ([], [])
    assert chosen_runs({"a": 1}, tmp_path) == ([], [])
    many = [made_run(tmp_path, f"r{number}", steps=1).id for number in range(MAX_RUNS + 1)]
    runs, refused = chosen_runs(",".join(many), tmp_path)
    assert (len(runs), len(refused)) == (MAX_RUNS, 1)
