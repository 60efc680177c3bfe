"""What is told of an evaluation: its state, its progress and its report, whatever the files hold."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from app.eval.folder import SAMPLES, EvaluationFolder, tasks_file
from app.eval.view import MOST_LISTED, entry, listed, result, standings
from app.runs.locks import lock_file
from tests.made_runs import add_evaluation, evaluation_document, made_run, parts_besides
from trainers.run.folder import Process, write_json

pytestmark = pytest.mark.usefixtures("elsewhere")
RUNS = Path("runs")
HOSTILE = "<img src=x onerror=alert(1)>"
VALUES = [
    None,
    True,
    -1,
    7.5,
    1e999,
    float("nan"),
    10**400,
    "x",
    HOSTILE,
    "\ud800",
    "\x1b[31m",
    [],
    [[]],
    {},
    {"a": []},
]


# -- the report --------------------------------------------------------------------------------------------------------


def test_a_report_is_told_by_metric_with_its_verdicts() -> None:
    view = result(add_evaluation(RUNS, evaluation_document()))
    assert view["models"] == ["base", "a-run"]
    loss, match = view["metrics"]
    assert (loss["title"], loss["lower"], match["lower"]) == ("loss", True, False)
    base, run = (row for row in loss["rows"] if row["source"] is None)
    assert (base["value"], base["low"], base["high"], base["rows"], base["verdict"]) == (2.0, 1.9, 2.1, 400, None)
    assert (run["verdict"], run["difference"], run["p_value"]) == ("better", -1.0, 0.0001)
    assert [row["verdict"] for row in match["rows"] if row["source"] is None] == [None, "no difference shown"]
    assert [(row["source"], row["value"]) for row in loss["rows"] if row["source"]] == [
        ("mails", 2.5), ("notes", 1.5), ("mails", 1.25), ("notes", 0.75),
    ]  # fmt: skip
    (standing,) = standings(view)
    assert standing == {"model": "a-run", "better": ["loss"], "worse": [], "forgot": [], "same": ["exact_match"],
                        "unknown": []}  # fmt: skip
    assert (view["parts"], view["notes"]) == ([], ["base: 3 of 400 answers were cut"])


@pytest.mark.parametrize("difference", [1.0, -1.0])
def test_what_a_command_line_measured_besides_is_told(difference: float) -> None:
    view = result(add_evaluation(RUNS, evaluation_document(**parts_besides(difference))))
    forgetting, judge, tasks = view["parts"]
    (loss,), (wins,), (quiz,) = (part["metrics"] for part in (forgetting, judge, tasks))
    assert [part["first"] for part in view["parts"]] == ["base"] * 3
    assert (forgetting["notes"], loss["group"]) == (["general text: one row was cut"], "general text")
    verdicts = [[row["verdict"] for row in metric["rows"]] for metric in (loss, wins, quiz)]
    gained, lost = ("better", "forgot") if difference > 0 else ("worse", "better")
    assert verdicts == [[None, lost], [gained], [None, gained]]
    assert judge["about"] == "judge-1 at http://127.0.0.1:9/v1"
    assert judge["notes"][0] == "a-run against base: 30 won, 5 lost, 4 tied, 1 identical"
    assert (quiz["lower"], quiz["rows"][0]["low"], quiz["rows"][0]["high"]) == (False, 0.402, 0.598)
    assert standings(view)[0]["forgot"] == (["general text"] if difference > 0 else [])


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"difference": 1.0}, "worse"),
        ({"difference": -1.0}, "better"),
        ({"difference": -1.0, "significant": False}, "no difference shown"),
        ({"difference": -1.0, "significant": "yes"}, "no difference shown"),
        ({"difference": None}, "cannot be compared"),
        ({"difference": "much"}, "cannot be compared"),
    ],
)
def test_the_verdict_in_words(part: dict[str, Any], expected: str) -> None:
    document = evaluation_document()
    document["comparisons"] = [{**document["comparisons"][0], **part}]
    view = result(add_evaluation(RUNS, document))
    assert [row["verdict"] for row in view["metrics"][0]["rows"][:2]] == [None, expected]
    assert view["metrics"][1]["rows"][1]["verdict"] is None, "it was not compared"


def test_a_metric_that_nobody_knows_is_told_by_its_name() -> None:
    document = evaluation_document()
    for entry_ in document["rows"] + document["comparisons"]:
        entry_["metric"] = {"loss": "mine.py:length", "exact_match": "judge"}[entry_["metric"]]
    view = result(add_evaluation(RUNS, document))
    assert [metric["title"] for metric in view["metrics"]] == ["length", "judge"]


def test_answers_are_told_by_row_with_what_differs() -> None:
    document = evaluation_document()
    (change,) = document["changed"]
    other = {**change, "b": "a-run@step-00000060", "answer_b": "a big dog", "is_right": False, "after": 0.5}
    (only,) = result(add_evaluation(RUNS, document))["changed"]
    assert (only["answer_a"], only["others"][0]["answer"]) == (
        [("a big ", False), ("cat", True)], [("a big ", False), ("bird", True)],
    )  # fmt: skip
    (row,) = result(add_evaluation(RUNS, {**document, "changed": [change, other]}, "eval-2"))["changed"]
    assert (row["row"], row["prompt"], row["expected"]) == ("test.jsonl:3", "What is it?", "a big bird")
    assert row["answer_a"] == [("a big cat", False)], "there are two others"
    assert [(each["b"], each["answer"][-1], each["is_right"]) for each in row["others"]] == [
        ("a-run", ("bird", True), True), ("a-run@step-00000060", ("dog", True), False),
    ]  # fmt: skip
    (alone,) = result(add_evaluation(RUNS, {"changed": [{**change, "answer_a": None, "answer_b": None}]}, "eval-3"))[
        "changed"
    ]
    assert (alone["answer_a"], alone["others"][0]["answer"]) == (None, None)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_a_report_and_a_note_may_hold_anything(value: Any) -> None:
    good = evaluation_document()
    row, comparison, change = good["rows"][0], good["comparisons"][0], good["changed"][0]
    documents: list[Any] = [value, dict.fromkeys(good, value), {**good, "rows": [value], "changed": [value]}]
    documents += [{**good, key: [dict.fromkeys(part, value), {**part, name: value}]}
                  for key, part in (("rows", row), ("comparisons", comparison), ("changed", change))
                  for name in part]  # fmt: skip
    besides = parts_besides()
    documents += [dict.fromkeys(besides, value)]
    for name, part in besides.items():
        spoilt = {key: [{**part[key][0], field: value} for field in part[key][0]] for key in ("rows", "comparisons")}
        documents += [{**good, name: {**part, key: entries}} for key, entries in spoilt.items()]
    documents += [{**good, "failed": {"a": value}, "notes": [value]}, {**good, "rows": {"model": value}}]
    for number, document in enumerate(documents):
        folder = add_evaluation(RUNS, None, f"eval-{number}")
        folder.report.write_text(json.dumps(document))
        write_note(folder, dict.fromkeys(("models", "command", "started_at", "host", "processes", "stopped_at"), value))
        state, view = entry(folder), result(folder)
        json.dumps([state, view, standings(view)], allow_nan=False).encode()
        assert state["state"] in ("done", "failed", "stopped")
    assert len(listed(RUNS)[0]) == len(documents)


def write_note(folder: EvaluationFolder, note: dict[str, Any]) -> None:
    (folder.path / "evaluation.json").write_text(json.dumps(note))


def test_a_long_report_is_told_in_part_and_says_so() -> None:
    document = evaluation_document()
    changes = [{**document["changed"][0], "row": f"test.jsonl:{number}"} for number in range(100)]
    view = result(add_evaluation(RUNS, {**document, "changed": changes}))
    assert len(view["changed"]) == 60
    assert view["left_out"] == ["60 of 100 changed answers are listed here"]
    long = {**document, "changed": [{**change, "prompt": "é" * 50_000} for change in changes]}
    view = result(add_evaluation(RUNS, long, "eval-2"))
    assert len(view["metrics"]) == 2
    assert 10 < len(view["changed"]) <= 60
    assert max(len(change["prompt"]) for change in view["changed"]) == 4001
    assert "report.json has the rest" in view["left_out"][0]


# -- its state ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "output", "state", "reason"),
    [
        (evaluation_document(), "", "done", ""),
        (evaluation_document(failed={"a-run": "out of memory"}), "", "failed", "a-run: out of memory"),
        (evaluation_document(interrupted=True, failed={"a": "b"}), "", "stopped", ""),
        ({"version": 9}, "", "failed", "of another version"),
        ("{", "", "failed", "its report cannot be read"),
        (None, "", "failed", "left no report"),
        (None, "[1/2] base on 1 process\nerror: the rows are missing\n", "failed", "the rows are missing"),
        (None, "[1/2] base\n\n", "failed", "its last line is: [1/2] base"),
    ],
)
def test_how_one_has_ended(document: Any, output: str, state: str, reason: str) -> None:
    folder = add_evaluation(RUNS, document if isinstance(document, dict) else None)
    if isinstance(document, str):
        folder.report.write_text(document)
    if output:
        folder.output.write_text(output)
    view_entry = entry(folder)
    assert view_entry["state"] == state
    assert reason in view_entry["reason"]
    assert (view_entry["doing"], view_entry["progress"]) == ("", None)


def test_an_older_one_without_a_note_is_told_from_its_report() -> None:
    folder = add_evaluation(RUNS, evaluation_document())
    (folder.path / "evaluation.json").unlink()
    state = entry(folder)
    assert state["models"] == ["base", "a-run"]
    assert state["started_at"][:2] == "20"
    assert state["command"] == "tunesmith eval a-run --answer_tokens 8"


def test_the_folder_of_the_report_is_no_part_of_the_command() -> None:
    command = ["tunesmith", "eval", "a b", "--output_dir", "/x/eval-1", "--changed", "3"]
    folder = add_evaluation(RUNS, evaluation_document(), command=command)
    assert entry(folder)["command"] == "tunesmith eval 'a b' --changed 3"


def test_progress_is_told_by_model_and_row() -> None:
    folder = add_evaluation(RUNS, None, models=["base", "a-run"])

    def view_entry() -> tuple[str, float]:
        state = entry(folder)
        assert state["state"] == "running"
        return state["doing"], state["progress"]

    with lock_file(folder.lock, ""):
        assert view_entry() == ("checking models and rows", 0.0)
        run = made_run(folder.path, "1-base", "queued", processes=[alive()])
        assert view_entry() == ("model 1 of 2, base: waits for its devices", 0.0)
        write_json(run.state_file, {**(run.read_state() or {}), "state": "running"})
        assert view_entry() == ("model 1 of 2, base: loading the model", 0.0)
        for section, rows, expected in (
            ("evaluation", [200, 400], ("model 1 of 2, base: loss, 200 of 400 rows", 0.0625)),
            ("sampling", [1, 1], ("model 1 of 2, base: answers, 1 of 1 row", 0.5)),
            ("sampling", ["x", None], ("model 1 of 2, base: loading the model", 0.0)),
            ("sampling", [1, 0], ("model 1 of 2, base: loading the model", 0.0)),
            ("sampling", {}, ("model 1 of 2, base: loading the model", 0.0)),
        ):
            run.heartbeats.mkdir(exist_ok=True)
            write_json(run.heartbeats / "rank-0.json", {"section": section, "rows": rows})
            assert view_entry() == expected
        write_json(run.state_file, {**(run.read_state() or {}), "state": "done"})
        assert view_entry() == ("model 2 of 2, a-run: preparing", 0.5)
        made_run(folder.path, "2-a-run", "failed")
        assert view_entry() == ("comparing the models", 1.0)


def test_progress_tells_of_tasks_and_samples_too() -> None:
    command = ["tunesmith", "eval", "a", "--forgetting", "--tasks", "quiz"]
    folder = add_evaluation(RUNS, None, models=["base", "a-run"], command=command)
    with lock_file(folder.lock, ""):
        run = made_run(folder.path, "1-base", "done")
        assert entry(folder)["doing"] == "model 1 of 2, base: tasks of lm-evaluation-harness"
        tasks_file(run).write_text("{}")
        assert entry(folder)["doing"] == "model 2 of 2, a-run: preparing"
        made_run(folder.path / SAMPLES, "1-base-general-text", "running", processes=[alive()])
        state = entry(folder)
        assert (state["doing"], state["progress"]) == ("model 1 of 2, base: forgetting, loading the model", 0.5)
        assert [each.id for each in folder.runs()] == ["1-base"]
        second = made_run(folder.path, "2-a-run", "done")
        assert folder.runs_of_samples(second) == []
        assert entry(folder)["doing"] == "model 2 of 2, a-run: tasks of lm-evaluation-harness"


def alive() -> dict[str, Any]:
    return Process.of("supervisor", pid=os.getpid()).as_json()


# -- the list ----------------------------------------------------------------------------------------------------------


def test_the_evaluations_of_a_run_are_those_of_its_checkpoints_too() -> None:
    assert listed(RUNS) == ([], 0)
    for number, models in enumerate((["base", "a-run"], ["a-run@step-00000060"], ["a-run-2"], ["b-run"])):
        add_evaluation(RUNS, None, f"eval-{number}", models=models)
    assert [each["id"] for each in listed(RUNS, "a-run")[0]] == ["eval-1", "eval-0"]
    assert listed(RUNS)[1] == 4
    for number in range(MOST_LISTED):
        add_evaluation(RUNS, None, f"eval-1{number:03}", models=["a-run"])
    entries, total = listed(RUNS)
    assert (len(entries), total) == (MOST_LISTED, MOST_LISTED + 4)
