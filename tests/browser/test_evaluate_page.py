"""The Evaluate page as a person uses it: from a run to a comparison, in the background, and what files may hold."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from app.eval.folder import EvaluationFolder, evaluations
from tests.browser.conftest import SHAPES, TIMEOUT, Served, Tabs, axe, is_whole, screenshot, wait_for
from tests.made_runs import add_checkpoint, add_evaluation, evaluation_document, made_run, parts_besides
from trainers.run.folder import Process

expect.set_options(timeout=1000 * TIMEOUT)
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a run, its evaluation, one that failed, one that runs, and one whose texts are hostile."""
    folder = tmp_path_factory.mktemp("ui")
    runs = folder / "runs"
    add_checkpoint(made_run(runs, "a-run", config={"eval_dataset_name": "embedded"}), 60)
    models = ["base", "a-run"]
    document = evaluation_document(**parts_besides())
    add_evaluation(runs, document, "eval-1", models=models, command=["tunesmith", "eval", "a-run"])
    add_evaluation(runs, None, "eval-2", models=models).output.write_text("error: the rows are missing\n")
    add_evaluation(runs, None, "eval-3", models=models, processes=[Process.of("eval", pid=os.getpid()).as_json()])
    document = evaluation_document(notes=[HOSTILE], failed={HOSTILE: HOSTILE, "b": "c"})
    document["changed"] = [{**document["changed"][0], "answer_b": HOSTILE, "row": HOSTILE * 9, "prompt": "x" * 9000}]
    for row in document["rows"]:
        row["model"] = {"base": "base", "a-run": HOSTILE * 9}[row["model"]]
    add_evaluation(runs, document, "eval-4", models=[HOSTILE * 9])
    served = Served(folder)
    yield served
    served.stop()


@pytest.mark.parametrize(("size", "scheme"), SHAPES)
@pytest.mark.parametrize(
    "path",
    [
        "/evaluate?eval=eval-1",
        *(pytest.param(f"/evaluate{query}", marks=pytest.mark.long) for query in ("", "?eval=eval-3", "?eval=eval-4")),
    ],
)
def test_it_is_whole_in_every_shape(new_page: Tabs, path: str, size: str, scheme: str) -> None:
    page = new_page(path, size, scheme)
    is_whole(page)
    screenshot(page, f"evaluate-{path.rpartition('=')[2].strip('/')}-{size}-{scheme}")
    axe(page)


def test_a_report_says_first_what_is_shown_and_in_words(new_page: Tabs, server: Served) -> None:
    page = new_page("/evaluate")
    entries = page.get_by_role("region", name="Evaluations")
    expect(entries).to_contain_text("The rows are missing".lower())
    entries.get_by_role("link", name="base and a-run").last.click()
    page.wait_for_url("**/evaluate?eval=eval-1")
    verdict = page.locator(".ts-verdicts")
    expect(verdict).to_contain_text(
        "a-run against base: better in Loss; it forgot, as general text shows; no difference shown in Exact match."
    )
    scores = page.get_by_role("region", name="Scores")
    expect(scores).to_contain_text("no difference shown")
    expect(scores.locator("svg.ts-whisker")).to_have_count(4)
    expect(page.get_by_role("region", name="Forgetting")).to_contain_text("forgot")
    expect(page.get_by_role("region", name="Tasks of lm-evaluation-harness")).to_contain_text("0.402")
    expect(page.get_by_role("region", name="Loss by source")).to_contain_text("mails")
    change = page.locator(".ts-change")
    assert change.locator("mark").all_inner_texts() == ["cat", "bird"]
    expect(page.locator("#eval-files")).to_contain_text("tunesmith eval a-run")
    expect(page.locator("#eval-form")).to_be_hidden()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download report.json").click()
    report = server.runs_dir / "eval-1" / "report.json"
    assert json.loads(Path(download.value.path()).read_text()) == json.loads(report.read_text())


def test_a_mistake_is_told_and_nothing_starts(new_page: Tabs, server: Served) -> None:
    before = evaluations(server.runs_dir)
    page = new_page("/evaluate?run=a-run")
    expect(page.locator("#eval-command")).to_contain_text("tunesmith eval a-run@step-00000060")
    page.locator("#opt-dataset_name input").fill("/etc/passwd")
    expect(page.locator("#eval-command")).to_contain_text("--dataset_name /etc/passwd")
    page.get_by_role("button", name="Evaluate", exact=True).click()
    expect(page.locator("#eval-mistakes [role=alert]")).to_contain_text("outside the allowed folders")
    assert evaluations(server.runs_dir) == before


def test_a_damaged_and_a_deleted_one_are_told(new_page: Tabs, server: Served) -> None:
    folder = add_evaluation(server.runs_dir, evaluation_document(), "eval-5")
    page = new_page("/evaluate?eval=eval-5")
    expect(page.locator(".ts-verdicts")).to_be_visible()
    folder.report.write_text('{"rows": 3')
    expect(page.locator("h1 + .ts-note + .ts-alert")).to_contain_text("cannot be read")
    for path in folder.path.iterdir():
        path.unlink()
    folder.path.rmdir()
    expect(page.get_by_role("heading", level=1)).to_have_text("No such evaluation")


def started(page: Page, server: Served) -> EvaluationFolder:
    """Starts the evaluation of the form."""
    page.get_by_role("button", name="Evaluate", exact=True).click()
    page.wait_for_url("**/evaluate?eval=*")
    return EvaluationFolder(server.runs_dir / page.url.rpartition("=")[2])


@pytest.mark.long
def test_an_evaluation_outlives_the_server_and_ends_in_a_comparison(new_page: Tabs, server: Served) -> None:
    rows = server.folder / "rows.jsonl"
    turns = [{"role": "user", "content": "Say yes"}, {"role": "assistant", "content": "yes"}]
    rows.write_text(f"{json.dumps({'messages': turns})}\n" * 12)
    page = new_page("/evaluate")
    page.locator("#opt-models input").fill("embedded")
    page.keyboard.press("Enter")
    page.locator("#opt-dataset_name input").fill(str(rows))
    page.locator("#opt-answer_tokens input").fill("4")
    page.locator("#opt-num_processes input").fill("1")
    expect(page.locator("#eval-command")).to_contain_text("--num_processes 1")
    folder = started(page, server)
    expect(page.locator(".ts-evaluation-head .ts-metered")).to_contain_text("checking models and rows")
    process = folder.process()
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)  # it stands still while the server is away
    page.context.close()
    server.restart()
    page = new_page(f"/evaluate?eval={folder.id}")
    expect(page.locator(".ts-evaluation-head .ts-metered")).to_be_visible()
    expect(page.locator("#eval-stop")).to_be_visible()
    os.kill(process.pid, signal.SIGCONT)
    expect(page.locator("#eval-result")).to_contain_text("embedded was evaluated alone")
    expect(page.locator("#eval-stop")).to_be_hidden()
    expect(page.get_by_role("region", name="Scores")).to_contain_text("12")


@pytest.mark.long
def test_one_is_stopped_after_a_question(new_page: Tabs, server: Served) -> None:
    page = new_page("/evaluate")
    page.locator("#opt-models input").fill("embedded")
    page.keyboard.press("Enter")
    page.locator("#opt-dataset_name input").fill("embedded")
    folder = started(page, server)
    process = folder.process()
    assert process is not None
    page.locator("#eval-stop").click()
    page.get_by_role("button", name="Go on").click()
    expect(page.get_by_role("button", name="Go on")).to_be_hidden()
    assert process.alive()
    page.locator("#eval-stop").click()
    page.get_by_role("button", name="Stop now").click()
    expect(page.get_by_role("heading", level=1).locator(".ts-badge")).to_have_text("stopped")
    wait_for(lambda: not process.alive(), "the end of its process")
    expect(page.locator("#eval-stop")).to_be_hidden()


def test_a_run_lists_its_evaluations_and_starts_one(new_page: Tabs) -> None:
    page = new_page("/run?run=a-run")
    part = page.locator("#run-evaluations")
    expect(part.get_by_role("link", name="base and a-run")).to_have_count(3)
    part.get_by_role("link", name="Evaluate this run").click()
    page.wait_for_url("**/evaluate?run=a-run")
    expect(page.locator("#opt-models")).to_contain_text("a-run@step-00000060")
