"""The Evaluate page without a browser: what its handlers do with any value, and that all text is escaped."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.eval.background import FIELDS
from app.eval.folder import EvaluationFolder
from tests.made_runs import add_checkpoint, add_evaluation, evaluation_document, made_run, parts_besides
from ui.context import ServerContext
from ui.pages import evaluate
from ui.pages.evaluate import evaluation_parts
from ui.pages.evaluate_parts import evaluations_table, run_evaluations

pytestmark = pytest.mark.usefixtures("elsewhere")
HOSTILE = "<img src=x onerror=alert(1)>"
ANY = [None, True, 0, -1.5, "", HOSTILE, "/etc/passwd", "--help", "x" * 100_000, "\ud800", [], [None], [HOSTILE], [[]],
       {},
       {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}]  # fmt: skip


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("served")
    with gr.Blocks():
        page = evaluate._Page(ServerContext(folder / "runs", (folder,), folder / "uploads", False))
        page.lay_out()
    return page


@pytest.fixture
def page(laid_out: Any, tmp_path: Path) -> Any:
    """The page, which takes a second to lay out, in an empty folder."""
    laid_out.context = ServerContext(tmp_path / "runs", (tmp_path,), tmp_path / "uploads", False)
    return laid_out


def asked_for(**query: Any) -> Any:
    return SimpleNamespace(query_params=query)


@pytest.mark.parametrize("position", range(len(FIELDS)), ids=FIELDS)
def test_a_handler_takes_any_value_and_starts_nothing(page: Any, position: int, tmp_path: Path) -> None:
    for value in ANY:
        raw = [["no-run"] if name == "models" else None for name in FIELDS]
        raw[position] = value
        mistakes, address = page.begin(*raw)
        assert address == ""
        assert 'role="alert"' in mistakes
        assert HOSTILE not in mistakes + page.preview(*raw)
    assert not list(tmp_path.glob("runs/eval-*"))


def test_an_address_of_any_value_is_answered(page: Any, tmp_path: Path) -> None:
    add_evaluation(tmp_path / "runs", evaluation_document())
    for value in [*ANY, "eval-1/..", "eval-none"]:
        if value is not None:
            head, *_, digest = page.refresh(None, asked_for(eval=value))
            assert "No such evaluation" in head
            assert HOSTILE not in head
            assert page.refresh(digest, asked_for(eval=value)) == [gr.skip()] * 10
            message, _ = page.end(asked_for(eval=value))
            assert "there is no such evaluation" in message.lower()
        models, _ = page.prefill(asked_for(run=value))
        assert models["value"] == []
        assert b'"error"' in page.report({"eval": value}).body


def test_a_digest_of_any_value_brings_the_whole_page(page: Any) -> None:
    for digest in [*ANY, "a b c d e"]:
        head, *_ = page.refresh(digest, asked_for())
        assert "<h1>Evaluate</h1>" in head


def test_the_run_of_the_address_is_chosen_with_its_newest_weights(page: Any, tmp_path: Path) -> None:
    run = made_run(tmp_path / "runs", "a-run")
    assert page.prefill(asked_for(run="a-run"))[0]["value"] == [], "there is nothing to load"
    for step in (30, 60):
        add_checkpoint(run, step)
    assert page.prefill(asked_for(run="a-run"))[0]["value"] == ["a-run@step-00000060"]


def test_every_text_of_a_report_is_escaped(tmp_path: Path) -> None:
    def spoilt(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spoilt(part) for key, part in value.items()} | ({HOSTILE: HOSTILE} if not value else {})
        return (
            [spoilt(part) for part in value]
            if isinstance(value, list)
            else HOSTILE
            if isinstance(value, str)
            else value
        )

    document = spoilt(evaluation_document(failed={HOSTILE: HOSTILE}, **parts_besides()))
    for row in document["rows"][2:]:
        row["source"] = HOSTILE
    folder = add_evaluation(tmp_path / "runs", document, models=[HOSTILE], command=[HOSTILE], started_at=HOSTILE)
    folder.output.write_text(HOSTILE)
    html = "".join(evaluation_parts(folder))
    assert HOSTILE not in html
    assert html.count("&lt;img") > 20
    run = made_run(tmp_path / "runs", "a-run")
    entries = [evaluate.entry(folder)]
    assert HOSTILE not in evaluations_table(entries, 1, "") + run_evaluations(run, entries, 1)


def without_words(html: str) -> str:
    """The HTML without the elements that keep a name on one line."""
    return re.sub('<span class="ts-word">(.*?)</span>', r"\1", html)


def test_the_verdict_comes_first_and_says_when_no_difference_is_shown(tmp_path: Path) -> None:
    def html(**parts: Any) -> str:
        return without_words(evaluation_parts(add_evaluation(tmp_path / "runs", evaluation_document(**parts)))[2])

    better = html()
    assert "<strong>a-run</strong> against base: better in Loss; no difference shown in Exact match." in better
    assert better.index("against base: better") < better.index("<table")
    assert "ts-alert-good" in better
    comparisons = evaluation_document()["comparisons"]
    same = html(comparisons=comparisons[1:], rows=evaluation_document()["rows"][2:4])
    assert "against base: no difference shown in Exact match." in same
    assert "ts-alert-info" in same
    worse = html(comparisons=[{**comparisons[0], "difference": 1.0}, {**comparisons[1], "significant": True}])
    assert "better in Exact match; worse in Loss" in worse
    assert "ts-alert-warning" in worse
    neither = html(comparisons=comparisons[1:])
    assert (neither.count("not compared"), neither.count("what the others are compared with")) == (3, 4)
    assert "was evaluated alone" in html(rows=evaluation_document()["rows"][:1], comparisons=[])
    assert "nothing to compare" in html(rows=[], comparisons=[], failed={"a": "b"})


def test_what_was_forgotten_is_in_the_first_sentence_and_has_a_table(tmp_path: Path) -> None:
    folder = add_evaluation(tmp_path / "runs", evaluation_document(**parts_besides()))
    listed = evaluations_table([evaluate.entry(folder)], 1, "")
    assert "a-run: better in 1 of 2 metrics, no difference shown in 1, it forgot" in listed
    html = without_words(evaluation_parts(folder)[2])
    assert "better in Loss; it forgot, as general text shows; no difference" in html
    assert '<span class="ts-worse">forgot</span>' in html
    assert "ts-alert-warning" in html, "better in one thing at the cost of another"
    for heading in ("Forgetting", "general text: Loss", "A judge", "Rows won", "Tasks of lm-evaluation", "quiz: acc"):
        assert heading in html
    assert "Forgetting" not in evaluation_parts(add_evaluation(tmp_path / "runs", evaluation_document()))[2]


def test_one_without_a_report_says_why_and_shows_its_output(tmp_path: Path) -> None:
    folder = add_evaluation(tmp_path / "runs", None, models=["a", "b", "c", "d"])
    folder.output.write_text("error: the rows are missing\n")
    head, _, report, files, visible = evaluation_parts(folder)
    assert "The rows are missing" in head
    assert "a, b and 2 more" in head
    assert (report, visible) == ("", "")
    assert "error: the rows are missing" in files


def test_a_download_is_the_report_unless_it_is_too_long(page: Any, tmp_path: Path) -> None:
    folder = add_evaluation(tmp_path / "runs", evaluation_document())
    assert b"test.jsonl:3" in page.report({"eval": folder.id}).body
    with open(folder.report, "ab") as file:
        file.truncate(5 << 20)
    assert b"too many to be sent; copy it from" in page.report({"eval": folder.id}).body
    assert b"there is no report yet" in page.report({"eval": add_evaluation(tmp_path / "runs", None, "eval-2").id}).body


def test_a_folder_that_goes_away_meanwhile_is_told(page: Any, tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path / "runs" / "eval-1")
    folder.path.mkdir(parents=True)
    *_, digest = page.refresh(None, asked_for(eval="eval-1"))
    folder.path.rmdir()
    head, *_ = page.refresh(digest, asked_for(eval="eval-1"))
    assert "No such evaluation" in head


def test_a_report_is_rendered_once_until_it_changes(page: Any, tmp_path: Path) -> None:
    folder = add_evaluation(tmp_path / "runs", evaluation_document())
    evaluate._report.cache_clear()
    request = asked_for(eval=folder.id)
    first = page.refresh("", request)
    assert [page.refresh(first[-1], request) for _ in range(3)] == [[gr.skip()] * 10] * 3
    assert page.refresh("", request)[6] == first[6], "another tab"
    assert evaluate._report.cache_info().misses == 1
    document = json.loads(folder.report.read_text())
    folder.report.write_text(json.dumps({**document, "failed": {"one": "gone", "other": "gone too"}}))
    changed = page.refresh(first[-1], request)
    assert "gone too" in str(changed[6]), "control"
    assert evaluate._report.cache_info().misses == 2
