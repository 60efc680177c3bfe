"""The pages of runs, with prepared run folders and with one that really trains."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from app.runs.fixed_prompts import MOST_BYTES
from app.runs.proofs import PROOFS
from app.sweep.record import SweepFolder, SweepRecord, SweepRun
from app.sweep.space import Axis
from tests.browser.conftest import SHAPES, TIMEOUT, Served, Tabs, axe, is_whole, screenshot, wait_for
from tests.forked import Popen
from tests.made_runs import add_checkpoint, add_proof, log_lines, made_run, proof_document
from trainers.run import device_locks
from trainers.run.answers_file import PromptLine, add_answers, begin_answers
from trainers.run.device_locks import Need
from trainers.run.folder import Process, RunFolder, write_json

HOSTILE = "<img src=x onerror=alert(1)>"
COMPARED = "/compare?runs=done-run,failed-run"
expect.set_options(timeout=1000 * TIMEOUT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose runs folder holds a finished, a failed, a stopped and a live run."""
    folder = tmp_path_factory.mktemp("ui")
    runs = folder / "runs"
    done = made_run(runs, "done-run", steps=600, resumed_at=300, strategy="fsdp2")
    add_checkpoint(done, 500, best=500)
    add_checkpoint(done, 600, best=500)
    add_proof(done, proof_document(True))
    add_proof(done, proof_document(False, 0.02, 0.9, row={"fault_seen": True}), 2, control=True)
    failed = made_run(runs, "failed-run", "failed", steps=120, total_steps=300, minutes=60, gpus="0,1",
                      cause=f"rank 1: ValueError: {HOSTILE}", config={"learning_rate": 1e-3})  # fmt: skip
    with open(failed.log, "w", encoding="utf-8") as log:
        log.write("".join(log_lines(4000)))
        log.write(f"2026-11-20T09:00:00.000+00:00 [rank 1] ValueError: \x1b[31m{HOSTILE}\x1b[0m\n")
        log.write("".join(log_lines(4000)))
    made_run(runs, "stopped-run", "stopped", steps=40, total_steps=100, minutes=90, cause="stopped by a stop request")
    made_run(runs, "live-run", "running", steps=80, total_steps=200, minutes=120,
             processes=[Process.of("supervisor", pid=os.getpid()).as_json()])  # fmt: skip
    served = Served(folder)
    yield served
    served.stop()


def grow(run: RunFolder, step: int) -> None:
    """One more step of a prepared run."""
    row = {
        "step": step,
        "attempt": 0,
        "loss": 9.25,
        "tokens": step * 10,
        "elapsed_s": step,
        "memory_gib_by_rank": [1, 2],
    }
    with open(run.metrics, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    with open(run.log, "a", encoding="utf-8") as file:
        file.write(f"2026-11-20T10:00:00.000+00:00 [rank 0] grown to step {step}\n")
    write_json(run.state_file, {**(run.read_state() or {}), "step": step})


# Keeps what is written on canvases from now on, and draws all charts anew.
_HEAR_TEXTS = """() => {
  window.texts = [];
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
    window.texts.push(text);
    return write.call(this, text, ...rest);
  };
}"""


def rows(page: Page) -> list[str]:
    return page.locator(".ts-runs tbody a").all_text_contents()


def no_side_scroll(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


def test_the_table_is_filtered_searched_sorted_and_kept_in_the_address(new_page: Tabs) -> None:
    page = new_page("/runs")
    expect(page.locator(".ts-runs tbody tr")).to_have_count(4)
    assert rows(page) == ["live-run", "stopped-run", "failed-run", "done-run"]
    page.get_by_label("State", exact=True).select_option("failed")
    expect(page.locator(".ts-runs tbody tr")).to_have_count(1)
    assert page.locator("img[src=x]").count() == 0
    expect(page.locator(".ts-cause")).to_contain_text(HOSTILE)
    page.reload()
    expect(page.locator(".ts-runs tbody tr")).to_have_count(1)
    page.get_by_label("State", exact=True).select_option("")
    page.get_by_label("Search").fill("FSDP2")
    expect(page.locator(".ts-runs tbody a")).to_have_text(["done-run"])
    page.get_by_label("Search").fill("")
    expect(page.locator(".ts-runs tbody tr")).to_have_count(4)
    page.get_by_role("button", name="Duration").click()
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("Duration")
    expect(page.locator("svg[aria-label^='loss from']")).to_have_count(4)


def test_the_table_moves_by_itself(new_page: Tabs, server: Served) -> None:
    page = new_page("/runs")
    run = RunFolder(server.runs_dir / "live-run")
    expect(page.get_by_text("/ 200")).to_be_visible()
    grow(run, 150)
    expect(page.get_by_text("150 / 200")).to_be_visible()
    made_run(server.runs_dir, "late-run", minutes=300)
    expect(page.get_by_role("link", name="late-run")).to_be_visible()


def test_a_header_keeps_the_focus_and_a_search_without_a_match_has_a_way_back(new_page: Tabs) -> None:
    page = new_page("/runs?q=nothing-like-it")
    page.get_by_role("button", name="Show all runs").click()
    expect(page.get_by_label("Search")).to_be_focused()
    header = page.get_by_role("button", name="Loss")
    header.focus()
    for order in ("descending", "ascending"):
        page.keyboard.press("Enter")
        expect(page.locator(f"th[aria-sort={order}]")).to_contain_text("Loss")
        expect(header).to_be_focused()


def test_the_queue_is_reordered_by_keyboard_and_by_drag(
    new_page: Tabs, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(server.folder / "state"))
    tickets, owners = [], [Process.of("supervisor", pid=pid) for pid in (os.getpid(), os.getppid(), 1)]
    with device_locks._mutex():
        for number, owner in enumerate(owners, start=1):
            run = made_run(server.runs_dir, f"wait-{number}", "queued", steps=0, processes=[owner.as_json()])
            tickets.append(device_locks.Ticket(run.id, str(run.path), Need(cpu_slots=1), number, owner))
            tickets[-1].write(number)

    def order() -> list[str]:
        return [ticket.name[-1] for ticket in device_locks.queue()]

    page = new_page("/runs")
    items, status = page.locator(".ts-queue li a"), page.locator(".ts-queue [role=status]")
    expect(items).to_have_text(["wait-1", "wait-2", "wait-3"])
    page.get_by_role("button", name="move wait-3 forward").focus()
    for place in (2, 1):
        page.keyboard.press("Alt+ArrowUp")
        expect(status).to_have_text(f"wait-3 is now number {place} of 3.")
        expect(items.nth(place - 1)).to_have_text("wait-3")
    expect(page.get_by_role("button", name="move wait-3 forward")).to_be_focused()
    assert order() == ["3", "1", "2"]
    page.locator(".ts-queue li").nth(0).drag_to(page.locator(".ts-queue li").nth(2), target_position={"x": 60, "y": 50})
    expect(items).to_have_text(["wait-1", "wait-2", "wait-3"])
    wait_for(lambda: order() == ["1", "2", "3"], "the new order")
    axe(page)
    device_locks.give_up(tickets[0])  # it starts while the page still shows it
    page.evaluate("Object.defineProperty(document, 'hidden', { value: true })")
    page.get_by_role("button", name="move wait-2 forward").click()
    expect(status).to_contain_text("no longer in the queue")
    assert order() == ["2", "3"]
    for ticket in tickets:
        device_locks.give_up(ticket)
        shutil.rmtree(ticket.run_dir)


def test_two_runs_are_chosen_and_compared(new_page: Tabs) -> None:
    page = new_page("/runs")
    compare = page.locator(".ts-runs a.ts-button")
    page.get_by_label("compare done-run").check()
    expect(compare).to_have_attribute("aria-disabled", "true")
    page.get_by_label("compare failed-run").check()
    compare.click()
    page.wait_for_url(re.compile("compare.runs=done-run"))
    settings = page.get_by_role("region", name="Settings that differ")
    expect(settings.get_by_text("learning_rate", exact=True)).to_be_visible()
    expect(page.get_by_text("weight_decay", exact=True)).to_be_hidden()
    page.get_by_text("settings are the same").click()
    expect(page.get_by_text("weight_decay", exact=True)).to_be_visible()
    expect(page.locator(".u-wrap[role=img]")).to_be_visible()
    legend = page.locator(".u-legend")
    expect(legend).to_contain_text("done-run")
    expect(legend).to_contain_text("failed-run")
    page.get_by_label("X axis").select_option("tokens")
    expect(legend).to_contain_text("tokens")
    expect(page.get_by_role("region", name="Measures")).to_contain_text("Last training loss")


@pytest.mark.parametrize("size", ["wide", pytest.param("phone", marks=pytest.mark.long)])
def test_sweeps_are_listed_and_lead_to_their_runs_and_back(new_page: Tabs, server: Served, size: str) -> None:
    """One with values that would be markup, whose process is gone; and a damaged one, which is left out."""
    folder = SweepFolder(server.runs_dir / "sweep-20261125-201344-tiny-lora-2386")
    record = SweepRecord(
        id=folder.id, preset="tiny-lora", config=None, options={"runs_dir": str(server.runs_dir)}, launch={},
        axes=[Axis(option="run_name", values=("a", HOSTILE))], search="grid", trial_count=2, seeds=[42], search_seed=0,
        parallel=1, devices=[{}], rungs=[0], halving=None, measure="last_eval_loss", better="low",
    )  # fmt: skip
    for value, name, score in ((HOSTILE, "done-run", 0.25), ("a", "failed-run", 0.5)):
        record.add_trial({"run_name": value}).runs = [SweepRun(id=name, seed=42, state="done", scores=[score])]
    damaged, member = SweepFolder(server.runs_dir / "sweep-two"), RunFolder(server.runs_dir / "done-run").sweep
    for each in (folder, damaged):
        each.path.mkdir()
        each.write(record)
    damaged.file.write_text('{"id": "sweep-two"}')
    try:
        page = new_page("/compare", size)
        table = page.get_by_role("region", name="Sweeps")
        expect(table).to_contain_text(f"run_name={HOSTILE}")
        expect(table).to_contain_text("unknown: one seed for each point")
        expect(table).to_contain_text("interrupted")
        expect(table).not_to_contain_text("sweep-two")
        assert table.evaluate("(box) => box.scrollWidth <= box.clientWidth"), "all of a sweep is in sight"
        is_whole(page)
        axe(page)
        screenshot(page, f"sweeps-{size}")
        table.get_by_role("link", name=folder.id).click()
        page.wait_for_url(re.compile("runs=done-run%2Cfailed-run&by=last_eval_loss"))
        write_json(member, {"sweep": folder.id, "trial": 1, "seed": 42})
        page = new_page("/run?run=done-run", size)
        expect(page.get_by_text(f"trial 1 of {folder.id}")).to_be_visible()
        is_whole(page)
        axe(page)
        screenshot(page, f"run-of-sweep-{size}")
        page.get_by_role("link", name=folder.id).click()
        page.wait_for_url(re.compile("runs=done-run%2Cfailed-run&by=last_eval_loss"))
        shutil.rmtree(folder.path)
        gone = f"trial 1 of {folder.id}, which is gone"
        expect(new_page("/run?run=done-run", size).get_by_text(gone)).to_be_visible()
    finally:
        member.unlink(missing_ok=True)
        shutil.rmtree(folder.path, ignore_errors=True)
        shutil.rmtree(damaged.path)


def test_seeds_are_one_band_and_the_best_is_by_the_chosen_measure(new_page: Tabs, server: Served) -> None:
    seeds = [made_run(server.runs_dir, f"seed-{seed}", config={"seed": seed}) for seed in (1, 2)]
    ids = [*(run.id for run in seeds), "failed-run"]
    page = new_page(f"/compare?runs={','.join(ids)}")
    verdict, legend = page.locator(".ts-best"), page.locator(".u-legend")
    expect(verdict).to_contain_text("in best evaluation loss")
    expect(page.get_by_role("region", name=re.compile("^Spread of"))).to_contain_text("Best evaluation loss")
    expect(legend).to_contain_text("seed-2")
    page.get_by_label("Seeds as mean and range").check()
    expect(legend).to_contain_text("mean of 2 seeds")
    expect(legend).not_to_contain_text("seed-2")
    page.get_by_label("Metric").select_option("grad_norm")
    page.get_by_label("Best by").click()
    page.get_by_role("option", name="Speed", exact=True).click()
    expect(verdict).to_contain_text("in speed")
    page.reload()
    expect(verdict).to_contain_text("in speed")
    expect(page.get_by_label("Metric")).to_have_value("grad_norm")
    expect(legend).to_contain_text("mean of 2 seeds")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").click()
    lines = download.value.path().read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["run", *ids]
    axe(page)
    for run in seeds:
        shutil.rmtree(run.path)


_AREA = "(plots) => plots.map((plot) => plot.clientWidth * plot.clientHeight)"


def test_a_finished_run_shows_charts_log_and_checkpoints(new_page: Tabs) -> None:
    page = new_page("/run?run=done-run")
    expect(page.locator("h1")).to_contain_text("done-run")
    expect(page.locator(".u-wrap[aria-label^='Loss: train from']")).to_be_visible()
    expect(page.locator(".u-legend").first).to_contain_text("replaced, attempt 1")
    loss, *others = page.locator(".ts-chart:visible .u-over").evaluate_all(_AREA)
    assert loss > 3 * max(others), "what training is about is the largest chart"
    expect(page.locator(".ts-lines")).to_contain_text("step 600")
    expect(page.get_by_role("region", name="Checkpoints")).to_contain_text("best")
    expect(page.get_by_role("button", name="Delete")).to_be_visible()
    expect(page.get_by_role("button", name="Resume")).to_be_hidden()
    page.get_by_label("Smoothing").fill("0.9")
    expect(page.locator(".u-legend").first).to_contain_text("train, as logged")
    rate = page.locator("figure", has=page.locator("figcaption:text-is('Learning rate')"))
    expect(rate.locator(".u-legend")).to_contain_text("learning rate")
    expect(rate.locator(".u-legend")).not_to_contain_text("as logged")  # it is set, and not measured
    page.get_by_label("Log scale").check()
    expect(page.locator(".u-wrap[aria-label^='Loss: train, as logged']")).to_be_visible()


def test_a_metric_of_the_users_own_objective_has_a_chart(new_page: Tabs, server: Served) -> None:
    run = made_run(server.runs_dir, "own-metric", minutes=400)
    rows = [{"step": step, "loss": 2.0, "tokens": step, "elapsed_s": step, "gap": step / 4} for step in range(1, 5)]
    rows += [{"step": 4, "eval_loss": 2.0, "eval_gap": 0.75}]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    page = new_page("/run?run=own-metric")
    legend = page.locator("figure:has(figcaption:text-is('gap')) .u-legend")
    expect(legend).to_contain_text("train")
    expect(legend).to_contain_text("evaluation")
    with run.metrics.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 5, "loss": 2.0, "tokens": 5, "elapsed_s": 5, "gap": 1.25, "spread": 3}) + "\n")
    expect(page.locator("figcaption:text-is('spread')")).to_be_visible()
    expect(page.locator("figcaption:text-is('gap')")).to_have_count(1)
    other = new_page("/run?run=done-run")
    expect(other.locator("figcaption:text-is('Loss')")).to_be_visible()
    expect(other.locator("figcaption:text-is('gap')")).to_have_count(0)  # control
    shutil.rmtree(run.path)


def test_charts_share_their_cursor_and_their_zoom(new_page: Tabs) -> None:
    page = new_page("/run?run=done-run")
    memory = page.locator("figure", has=page.locator("figcaption:text-is('Memory')"))
    expect(memory.locator(".u-wrap")).to_be_visible()
    # Before a pointer is on it.
    expect(memory.locator(".u-legend")).to_contain_text(re.compile(r"steplast.*1\.5 GiB"))
    area = page.locator("figure:has(figcaption:text-is('Loss')) .u-over")
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    assert box
    left, middle, width = box["x"], box["y"] + box["height"] / 2, box["width"]
    page.mouse.move(left + width / 4, middle)
    expect(memory.locator(".u-legend .u-series").nth(0)).to_contain_text(re.compile(r"step1[45]\d"))
    expect(memory.locator(".u-legend .u-series").nth(1)).to_contain_text(re.compile(r"1\.[345]"))
    everything = page.get_by_role("button", name="Show the whole run")
    expect(everything).to_be_hidden()
    page.mouse.down()
    page.mouse.move(left + width / 2, middle, steps=4)
    page.mouse.up()
    zoomed = re.compile(r"zoomed to step 1[45]\d\S* to (30\d|29\d)")
    for chart in (area.locator(".."), memory.locator(".u-wrap")):
        expect(chart).to_have_attribute("aria-label", zoomed)
    everything.click()
    expect(memory.locator(".u-wrap")).not_to_have_attribute("aria-label", zoomed)
    expect(everything).to_be_hidden()


def test_a_rewarded_run_is_watched_by_its_reward_and_numbers_are_told_apart(new_page: Tabs, server: Served) -> None:
    run = made_run(server.runs_dir, "rewarded-run", minutes=420)
    rows = [
        {"step": step, "loss": 0.0, "reward": step / 10, "learning_rate": step * 2e-5, "data_wait": 0.0,
         "memory_gib": 1.4 + 0.02 * step, "memory_gib_by_rank": [1.6 - 0.02 * step, 1.4 + 0.02 * step],
         "elapsed_s": step}
        for step in range(1, 5)
    ]  # fmt: skip
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = new_page("/runs")
    row = page.locator(".ts-runs tbody tr", has_text="rewarded-run")
    expect(row.locator(".ts-loss")).to_contain_text("0.4000reward")
    expect(row.get_by_label("reward from 0.1000 to 0.4000")).to_be_visible()
    expect(page.get_by_role("button", name="Loss or reward")).to_be_visible()
    page.goto(server.url + "/run?run=rewarded-run")
    page.evaluate(_HEAR_TEXTS)
    page.get_by_label("Log scale").check()
    page.get_by_label("Log scale").uncheck()
    expect(page.locator(".ts-facts")).to_contain_text("1.6 GiB, rank 0")  # its peak, though it has 1.5 GiB now
    chart = page.locator(".ts-chart", has_text="Learning rate")
    expect(chart.locator(".u-legend")).to_contain_text("8e-05")
    page.wait_for_function("window.texts.includes('8e-05')")
    ticks = set(page.evaluate("window.texts"))
    assert {"1.44 GiB", "1.46 GiB", "1.48 GiB"} <= ticks
    assert "100" not in ticks  # of a loss that is 0 throughout
    shutil.rmtree(run.path)


def test_sampled_answers_are_read_by_step_and_prompt(new_page: Tabs, server: Served) -> None:
    run = made_run(server.runs_dir, "sampled-run", minutes=400)
    rows = [{"step": step, "loss": 0.0, "tokens": step, "elapsed_s": step, "reward": step / 10} for step in (1, 2)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run.rollouts.mkdir()

    def write(step: int) -> None:
        texts = [["What is 2 + 2?", "\n5", "4"], ["What is 2 + 2?", "4", "4"], ["<b>Why?</b>", "", "So."]]
        functions = {"exact_match": [0, 1, 0], "/f.py:short": [0, 1, 0]}
        record = {"prompts": [3, 3, 8], "answers": [[1], [1, 2], [1]], "ended": [False, True, True], "texts": texts,
                  "rewards": [0.0, step, 0.5], "by_function": functions}  # fmt: skip
        (run.rollouts / f"step-{step}.json").write_text(json.dumps(record), encoding="utf-8")

    write(1)
    write(2)
    page = new_page("/run?run=sampled-run")
    part, facts = page.locator(".ts-answers"), page.locator(".ts-facts")
    expect(facts).to_contain_text("Reward0.2")
    expect(facts).not_to_contain_text("Loss")
    part.scroll_into_view_if_needed()
    expect(part).to_contain_text("Step 2, prompt 1 of 2: mean reward 1.")
    best_first = [re.compile("2.*1.*2.*4"), re.compile("0.*5 … cut at max_completion_length")]
    expect(part.locator("tbody tr")).to_have_text(best_first)
    expect(part.locator("th")).to_have_text(["Reward", "exact_match", "short", "Tokens", "Answer"])
    axe(page)
    page.get_by_role("button", name="Next prompt").click()
    expect(part.locator(".ts-prompt")).to_have_text("<b>Why?</b>")  # as text, not as markup
    expect(part.locator("tbody")).to_contain_text("empty")
    write(3)  # what is read stays, though the run goes on
    page.get_by_role("button", name="Earlier step").click()
    expect(part).to_contain_text("Step 1, prompt 2 of 2")
    for _ in range(2):
        page.get_by_role("button", name="Later step").click()
    expect(part).to_contain_text("Step 3, prompt 2 of 2")
    expect(page.get_by_role("button", name="Later step")).to_have_attribute("aria-disabled", "true")
    write(4)  # the newest step is followed
    expect(part).to_contain_text("Step 4, prompt 2 of 2", timeout=20_000)
    shutil.rmtree(run.path)


def test_answers_to_a_prompt_are_read_by_step(new_page: Tabs, server: Served) -> None:
    run = made_run(server.runs_dir, "answered-run", minutes=400)

    def write(step: int, *texts: str) -> None:
        answers = [(f"e.jsonl:{number}", text, step < 20) for number, text in enumerate(texts)]
        add_answers(run.answers, step, answers)

    begin_answers(run.answers, [PromptLine(f"e.jsonl:{number}", f"{HOSTILE} {number}?", "4") for number in range(2)])
    write(0, "It is 5.", "")
    write(10, f"It is {HOSTILE}.", "So")
    page = new_page("/run?run=answered-run")
    part, lines = page.locator(".ts-fixed-prompts"), page.locator(".ts-fixed-prompts tbody tr")
    part.scroll_into_view_if_needed()
    expect(part.locator(".ts-prompt")).to_have_text(f"{HOSTILE} 0?")  # as text, not as markup
    expect(lines).to_have_text(["0It is 5.", f"10It is {HOSTILE}."])
    expect(part.locator("mark")).to_have_text([HOSTILE])
    axe(page)
    write(20, f"It is {HOSTILE}.", "So")  # comes by itself, without the steps before it
    with page.expect_response(lambda response: '"full":false' in response.text(), timeout=20_000) as answer:
        expect(lines).to_have_count(3, timeout=20_000)
    assert len(answer.value.body()) < 400
    expect(lines.nth(2)).to_have_text(f"20It is {HOSTILE}. … cut at eval_answer_tokens same as before")
    part.get_by_role("combobox").select_option("2: e.jsonl:1")
    expect(lines).to_have_text(["0empty", "10So", "20So … cut at eval_answer_tokens same as before"])
    expect(part.get_by_role("status")).not_to_contain_text("older steps")
    write(25, "x" * MOST_BYTES, "So")  # the window begins within this step
    write(30, "It is 4.", "Then")
    expect(lines).to_have_text(["30Then … cut at eval_answer_tokens"], timeout=20_000)
    expect(part.get_by_role("status")).to_contain_text("Listed are the newest (1); older steps are in answers.jsonl.")
    page = new_page("/run?run=done-run")  # without the option, there is nothing to see
    expect(page.locator(".ts-fixed-prompts:not(.ts-wait)")).to_be_hidden()
    expect(page.get_by_role("heading", name="Answers", exact=True)).to_be_hidden()
    shutil.rmtree(run.path)


def test_each_rank_has_a_chart_and_its_memory_beside_the_plan(new_page: Tabs, server: Served) -> None:
    run = made_run(server.runs_dir, "wide-run", world=12, minutes=400)
    lines = [
        {"step": step, "loss": 1.0, "tokens": step, "elapsed_s": step, "slow_ranks": [9] if step == 5 else [],
         "memory_gib_by_rank": [1.0 + rank * step / 100 for rank in range(12)]}
        for step in range(1, 11)
    ]  # fmt: skip
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    page = new_page("/run?run=wide-run")
    page.locator(".ts-ranks").scroll_into_view_if_needed()
    expect(page.locator(".ts-rank")).to_have_count(8)
    expect(page.locator(".ts-ranks")).to_contain_text("8 of 12 ranks")
    expect(page.locator(".ts-ranks")).to_contain_text("Slowest: rank 9, found slow once.")
    page.get_by_role("button", name="Show all 12").click()
    expect(page.locator(".ts-rank")).to_have_count(12)
    ends = page.locator(".ts-rank figcaption span:last-child")
    expect(ends).to_have_text([f"{1 + rank / 10:.1f}" for rank in range(12)])
    page.locator(".ts-rank-plot").nth(3).hover(position={"x": 1, "y": 20})
    expect(ends).to_have_text([f"{1 + rank / 100:.2f}" for rank in range(12)])
    expect(page.locator(".ts-memory tbody tr").last).to_contain_text("2.1 GiB")
    shutil.rmtree(run.path)


def test_nothing_is_claimed_of_ranks_that_logged_nothing_or_are_alone(new_page: Tabs, server: Served) -> None:
    """Control of the charts by rank and of the memory: as many as there are, none slow, and no number from nowhere."""
    row = {"loss": 1.0, "tokens": 1, "elapsed_s": 1}
    made = {
        "alone": ("single", {"memory_gib_by_rank": [1.0]}),
        "even": ("ddp", {"memory_gib_by_rank": [1.0, 1.0], "slow_ranks": []}),
        "silent": ("ddp", {}),
    }
    runs = [
        made_run(server.runs_dir, f"{name}-run", strategy=strategy, world=1 if strategy == "single" else 2)
        for name, (strategy, _) in made.items()
    ]
    for run, (_, more) in zip(runs, made.values(), strict=True):
        lines = [json.dumps({"step": step, **row, **more}) + "\n" for step in (1, 2, 3)]
        run.metrics.write_text("".join(lines), encoding="utf-8")
    for name, charts, memory in (("alone", 0, 1), ("even", 2, 2), ("silent", 0, 0)):
        page = new_page(f"/run?run={name}-run")
        ranks, note = page.locator(".ts-ranks"), page.locator(".ts-memory .ts-note")
        page.locator(".ts-memory").scroll_into_view_if_needed()
        expect(note).not_to_have_text("")
        expect(page.locator(".ts-memory tbody tr")).to_have_count(memory)
        if not memory:
            expect(note).to_have_text("No rank has logged its memory yet.")
        if charts:
            expect(ranks).to_contain_text("No rank was found slow")
            expect(page.locator(".ts-rank-slow")).to_have_count(0)
        else:
            expect(page.get_by_role("heading", name="Ranks", exact=True)).to_be_hidden()
        expect(page.locator(".ts-rank:visible")).to_have_count(charts)
    for run in runs:
        shutil.rmtree(run.path)


def test_ranks_and_the_large_charts_show_the_same_step(new_page: Tabs, server: Served) -> None:
    run = made_run(server.runs_dir, "two-ranks", minutes=400)
    lines = [
        {"step": step, "loss": 100.0 + step, "tokens": step * 1000, "elapsed_s": step * 60,
         "memory_gib_by_rank": [step, 2 * step]} for step in range(1, 12)
    ]  # fmt: skip
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    page = new_page("/run?run=two-ranks")
    loss = page.locator("figure:has(figcaption:text-is('Loss'))")
    legend, ends = loss.locator(".u-legend .u-series"), page.locator(".ts-rank figcaption span:last-child")
    plot, status = page.locator(".ts-rank-plot").first, page.locator(".ts-ranks .ts-note")
    page.locator(".ts-ranks").scroll_into_view_if_needed()
    for axis, first in (("step", "4"), ("tokens", "4000"), ("elapsed_s", "4 min 00 s")):
        page.get_by_label("X axis").select_option(axis)
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        assert box
        page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 20)
        expect(status).to_contain_text("At step 4:")
        expect(legend.nth(0)).to_contain_text(first)
        expect(legend.nth(1)).to_contain_text("104")
        page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 20)
        expect(legend.nth(1)).to_contain_text("108")  # control: it follows
        page.mouse.move(2, box["y"])
        expect(legend.nth(1)).not_to_contain_text("10")
        area = loss.locator(".u-over")
        area.hover(position={"x": 0.5 * (area.bounding_box() or {})["width"], "y": 50})
        expect(legend.nth(1)).to_contain_text("106")
        expect(ends).to_have_text(["6", "12"])
        expect(status).to_contain_text("At step 6:")
        page.locator("h1").hover()
        expect(ends).to_have_text(["11", "22"])
    shutil.rmtree(run.path)


def test_a_failed_run_says_why_and_its_error_is_found(new_page: Tabs) -> None:
    page = new_page("/run?run=failed-run")
    expect(page.get_by_role("alert")).to_contain_text(HOSTILE)
    expect(page.get_by_text("To continue from the start")).to_contain_text("tunesmith resume")
    lines = page.locator(".ts-lines")
    expect(lines).to_contain_text("step 4000")
    page.get_by_role("button", name="Previous error").click()
    expect(page.locator(".ts-found .ts-text")).to_have_text(f"ValueError: {HOSTILE}")
    assert page.locator("img[src=x]").count() == 0
    page.get_by_label("Written by").select_option("1")
    expect(lines.locator(".ts-by").last).to_have_text("rank 1")
    page.get_by_label("Find").fill("step 17 ")
    page.get_by_role("button", name="Previous", exact=True).click()
    expect(page.locator(".ts-found .ts-text")).to_contain_text("step 17 loss")


# Counts the frames in which there is nothing to choose from, and those of them in which one sees it.
_SEE_EMPTY_CHOICE = """window.waited = window.empty = 0;
const look = () => {
  const choice = document.querySelector(".ts-ranks select");
  if (choice && !choice.options.length) {
    window.waited += 1;
    if (getComputedStyle(choice).visibility === "visible") window.empty += 1;
  }
  requestAnimationFrame(look);
};
look();"""


def test_a_cause_is_told_once_its_remedies_are_named_and_nothing_stands_empty(new_page: Tabs, server: Served) -> None:
    run = made_run(server.runs_dir, "memory-run", "failed", cause="rank 1: torch.OutOfMemoryError: CUDA out of memory")
    page = new_page("/runs", "phone")
    page.add_init_script(_SEE_EMPTY_CHOICE)
    page.goto(f"{server.url}/run?run=memory-run")
    expect(page.get_by_role("alert")).to_contain_text("Rank 1 ran out of memory")
    expect(page.get_by_text("CUDA out of memory")).to_have_count(1)
    first, resume = page.locator("#run-remedy-1"), page.locator("#run-resume")
    expect(first).to_have_text("Resume: recompute activations in the backward pass")
    expect(first).to_have_class(re.compile(r"\bprimary\b"))
    expect(resume).to_have_class(re.compile(r"\bsecondary\b"))
    cause, button, plain = ((found.bounding_box() or {})["y"] for found in (page.get_by_role("alert"), first, resume))
    assert cause < button < plain
    is_whole(page)
    page.locator(".ts-ranks").scroll_into_view_if_needed()
    expect(page.locator(".ts-ranks select")).to_have_value("memory_gib")
    expect(page.locator(".ts-ranks select")).to_be_visible()
    waited, empty = page.evaluate("[window.waited, window.empty]")
    assert waited > 0, "control: there was nothing to choose from at first"
    assert empty == 0
    axe(page)
    screenshot(page, "run-out-of-memory-phone")
    shutil.rmtree(run.path)


def test_a_diagnosis_that_comes_does_not_move_the_buttons_of_a_live_run(new_page: Tabs, server: Served) -> None:
    supervisor = Process.of("supervisor", pid=os.getpid()).as_json()
    run = made_run(server.runs_dir, "slow-run", "running", steps=40, total_steps=90, processes=[supervisor])
    page = new_page("/run?run=slow-run")
    stop, charts = page.locator("#run-stop"), page.get_by_role("heading", name="Charts")
    clone = page.locator("#run-clone_live")
    expect(stop).to_be_visible()
    at, beside, below = stop.bounding_box(), clone.bounding_box(), charts.bounding_box()
    assert at is not None
    assert beside is not None
    assert at["y"] == beside["y"], "what can be done with a live run stands in one row"
    expect(page.locator("#run-clone")).to_be_hidden()
    with run.metrics.open("a") as lines:
        for step in range(41, 47):
            row = {"step": step, "loss": 1.0, "elapsed_s": float(step), "slow_ranks": [1]}
            lines.write(json.dumps({**row, "tokens": step, "attempt": 0}) + "\n")
    expect(page.locator("#run-diagnosis")).to_contain_text("Rank 1 is slow", timeout=30_000)
    assert stop.bounding_box() == at
    assert charts.bounding_box() != below, "control: what stands below it is moved"
    shutil.rmtree(run.path)


def test_a_diagnosis_has_a_button_for_each_remedy(new_page: Tabs, server: Served) -> None:
    page = new_page("/run?run=failed-run")
    expect(page.locator(".ts-diagnosis")).to_contain_text(HOSTILE)
    assert page.locator("img[src=x]").count() == 0
    cause = "step 9: loss nan, gradient norm nan, on rank 0, in the batch from data.jsonl:7; no weight was updated"
    run = made_run(server.runs_dir, "bad-run", "failed", steps=8, world=1, strategy="single", cause=cause,
                   config={"eval_dataset_name": "none", "max_steps": 3})  # fmt: skip
    page = new_page("/run?run=bad-run")
    card = page.locator(".ts-diagnosis")
    expect(card).to_contain_text("at step 9, on rank 0, in the batch from data.jsonl:7")
    expect(card.locator("li[value='1']")).to_contain_text("--non_finite=skip")
    page.locator("#run-remedy-1").click()
    expect(card).to_have_count(0)
    wait_for(lambda: (run.read_state() or {})["state"] == "done", "the remedied run")
    assert "non_finite: skip" in run.config.read_text()
    expect(page.locator(".ts-notice")).to_contain_text("bad-run")  # it was started here
    shutil.rmtree(run.path)


@pytest.mark.long
def test_a_strategy_is_proved_while_the_server_restarts(new_page: Tabs, server: Served) -> None:
    options = {"max_train_samples": 60, "max_length": 128, "global_batch_size": 4, "per_device_train_batch_size": 2}
    run = made_run(server.runs_dir, "proved-run", minutes=500, config=options)
    page = new_page("/run?run=proved-run")
    expect(page.locator("#run-proof")).to_contain_text("Does ddp on 2 processes train the same model as one process?")
    page.get_by_role("button", name="Prove this strategy").click()
    progress = page.locator("#run-proof .ts-metered")
    expect(progress).to_contain_text("one process")
    process = PROOFS.of(run)[0].process()
    assert process is not None
    os.killpg(process.pid, signal.SIGSTOP)  # it stands still while the server is away
    page.context.close()
    server.restart()
    page = new_page("/run?run=proved-run")
    expect(page.locator("#run-proof .ts-metered")).to_be_visible()
    expect(page.get_by_role("button", name="Prove this strategy")).to_be_hidden()
    expect(page.get_by_role("button", name="Stop the proof")).to_be_visible()
    os.killpg(process.pid, signal.SIGCONT)
    verdict = page.locator("#run-proof-results .ts-alert-good")
    expect(verdict).to_contain_text("ddp on 2 processes trains the same model as one process.")
    expect(verdict).to_contain_text("of 20 steps identical")
    expect(page.get_by_role("button", name="Prove this strategy")).to_be_visible()
    shutil.rmtree(run.path)


def test_no_line_of_a_long_log_is_lost_or_shown_twice(new_page: Tabs, server: Served) -> None:
    """The page keeps 4000 lines: what is dropped at one end while the other grows comes back when it is asked for."""
    with open(server.runs_dir / "failed-run" / "log.txt", "rb") as log:
        starts = [0, *itertools.accumulate(map(len, log))][:-1]
    page = new_page("/run?run=failed-run")
    expect(page.locator(".ts-lines")).to_contain_text("step 4000")

    def offsets() -> list[int]:
        return page.eval_on_selector_all(".ts-line", "lines => lines.map(line => +line.dataset.at)")

    def load(which: str, moved: Callable[[list[int], list[int]], bool]) -> None:
        before = offsets()
        page.get_by_role("button", name=f"Load {which} lines").click()
        wait_for(lambda: moved(before, offsets()), f"{which} lines")
        first = starts.index(offsets()[0])
        assert offsets() == starts[first : first + len(offsets())]

    while len(offsets()) < 4000 or offsets()[-1] == starts[-1]:
        load("older", lambda before, now: now[0] < before[0])
    load("newer", lambda before, now: now[-1] > before[-1])


def test_a_live_run_moves_in_two_tabs(new_page: Tabs, server: Served) -> None:
    first, second = new_page("/run?run=live-run"), new_page("/run?run=live-run", size="phone")
    run = RunFolder(server.runs_dir / "live-run")
    for page, step in ((first, 160), (second, 170)):
        expect(page.locator(".ts-lines")).to_contain_text("rank 0")
        grow(run, step)
        expect(page.locator(".ts-lines")).to_contain_text(f"grown to step {step}")
        expect(page.locator(".ts-metered").first).to_contain_text(f"{step} of 200")
        expect(page.locator(".u-wrap[aria-label$='to 9.25']").first).to_be_attached()
    expect(first.get_by_role("button", name="Stop and save")).to_be_visible()
    expect(first.get_by_role("button", name="Delete")).to_be_hidden()


def test_stopping_asks_the_run(new_page: Tabs, server: Served) -> None:
    page = new_page("/run?run=live-run")
    page.get_by_role("button", name="Stop without saving").click()
    expect(page.get_by_text("All progress since the last checkpoint is lost.")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    assert not RunFolder(server.runs_dir / "live-run").stop_request.exists()
    page.get_by_role("button", name="Stop and save").click()
    expect(page.get_by_text("stop requested")).to_be_visible()
    assert RunFolder(server.runs_dir / "live-run").stop_request.exists()


def test_a_run_is_renamed_and_deleted(new_page: Tabs, server: Served) -> None:
    made_run(server.runs_dir, "old-name")
    page = new_page("/run?run=old-name")
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("New name").fill("../evil")
    page.locator("#sure-rename").click()
    expect(page.locator(".ts-alert-error")).to_contain_text("is refused")
    page.get_by_label("New name").fill("new-name")
    page.locator("#sure-rename").click()
    page.wait_for_url(re.compile("run=new-name"))
    expect(page.locator("h1")).to_contain_text("new-name")
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_text(re.compile(r"log of new-name \(\d.* (KiB|MiB|B)\)"))).to_be_visible()
    page.locator("#sure-delete").click()
    page.wait_for_url(re.compile("/runs"))
    assert not (server.runs_dir / "new-name").exists()
    assert (server.runs_dir / "done-run").exists()


@pytest.mark.parametrize(
    "name", ["nothing", "../../etc", "%2Fetc%2Fpasswd", "..", "", HOSTILE, "a%00b", "%F0%9F%98%80"]
)
def test_an_unknown_run_says_so(new_page: Tabs, name: str) -> None:
    page = new_page(f"/run?run={name}")
    expect(page.locator("h1")).to_have_text("No such run")
    expect(page.get_by_role("link", name="all runs")).to_be_visible()
    assert page.locator("img[src=x]").count() == 0


@pytest.mark.parametrize(("size", "scheme"), SHAPES)
@pytest.mark.parametrize(
    "path", ["/runs", "/run?run=done-run", "/run?run=failed-run", "/compare?runs=done-run,failed-run"]
)
def test_the_pages_fit_and_axe_finds_nothing(new_page: Tabs, path: str, size: str, scheme: str) -> None:
    page = new_page(path, size=size, scheme=scheme)
    expect(page.locator("svg[aria-label^='loss from'], .u-wrap[role=img]").first).to_be_visible()
    if path.startswith("/run?"):
        expect(page.get_by_role("heading", name="Checkpoints")).to_be_attached()
    screenshot(page, f"{re.sub(r'[^a-z]+', '-', path).strip('-')}-{size}-{scheme}")
    is_whole(page)
    axe(page)


def test_a_real_run_is_watched_from_its_start(new_page: Tabs, server: Served) -> None:
    page = new_page("/runs")
    log = open(server.folder / "train.log", "wb")  # noqa: SIM115 - for as long as the child lives
    own = {"XDG_STATE_HOME": str(server.folder / "state"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = ["train", "tiny-lora", "--max_steps", "12", "--num_processes", "1", "--output_dir", "runs/real"]
    root = str(Path(__file__).resolve().parents[2])
    argv = [sys.executable, "-P", "-m", "app.cli", *words]
    training = Popen(argv, cwd=server.folder, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": root, **own})
    try:
        page.get_by_role("link", name="real").click()
        page.wait_for_url(re.compile("run=real"))
        expect(page.locator(".ts-lines")).to_contain_text("step 12 loss")
        wait_for(lambda: training.poll() is not None, "the end of the training")
        expect(page.locator("h1 .ts-badge")).to_have_text("done")
        expect(page.locator(".ts-alert-good")).to_contain_text("The model is in")
        expect(page.get_by_role("region", name="Checkpoints")).to_contain_text("step-00000012")
    finally:
        training.kill()
        training.wait()
        log.close()
