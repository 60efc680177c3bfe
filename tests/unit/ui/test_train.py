"""The Train page's form: its list of GPUs (stand-ins: none is here), what an address opens, and its strategy."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.services.choices import GpuChoice
from app.services.form import preview
from app.services.machines_form import MACHINES_FIELDS, machines_texts
from app.services.memory_check import Verdict
from app.services.slurm_form import SLURM_FIELDS
from app.services.starting_values import NAMING, starting_values
from tests.made_runs import made_run
from trainers.config.own_data import DESCRIBING
from ui.context import ServerContext
from ui.pages import strategy_parts, train, train_parts
from ui.pages.train_devices import JOB_NAMES
from ui.pages.train_parts import component_value

NO_MACHINES = [""] * len(MACHINES_FIELDS)


def gpus(*holders: str) -> list[GpuChoice]:
    return [GpuChoice(number, "H100", 80 << 30, 79 << 30, holder) for number, holder in enumerate(holders)]


def opened(page: Any, draft: str = "", **query: str) -> Any:
    request: Any = SimpleNamespace(query_params=query)
    return page.prefill(draft, request)[train._DEVICES]


def test_who_holds_a_gpu_is_told_when_the_page_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "gpu_choices", lambda: gpus("", ""))
    here = ServerContext(tmp_path / "runs", (tmp_path,), tmp_path / "uploads", False)
    with gr.Blocks():
        page = train._Form(here)
        page.lay_out()
    assert opened(page)["value"] == ["0", "1"]
    monkeypatch.setattr(train, "gpu_choices", lambda: gpus("", "other-run"))
    shown = opened(page)
    assert shown["value"] == ["0"], "a GPU that is held is not ticked"
    monkeypatch.setattr(train, "gpu_choices", lambda: gpus("", "", ""))
    assert "2 of 3 GPUs used: global_batch_size=16" in opened(page)["info"]
    assert "of 3" not in opened(page, draft='{"devices": ["1"]}')["info"], "that was not the default"
    monkeypatch.setattr(train, "gpu_choices", lambda: gpus("", "other-run"))
    assert shown["choices"][1][0].endswith("held by other-run")
    made_run(tmp_path / "runs", "mine", strategy="single", world=1, gpus="1")
    assert opened(page, clone="mine")["value"] == ["1"], "a clone keeps what its run chose"
    assert opened(page, draft='{"devices": ["1"]}')["value"] == ["1"], "and so does a draft"
    assert opened(page, draft='{"preset": "tiny-full"}')["value"] == ["0"], "a draft from the Data page chose none"


@pytest.fixture
def page(tmp_path: Path) -> Any:
    """The form on a machine without GPUs."""
    with gr.Blocks():
        page = train._Form(ServerContext(tmp_path / "runs", (tmp_path,), tmp_path / "uploads", False))
        page.lay_out()
    return page


@pytest.mark.parametrize("name", ["nope", "../etc", "/etc/passwd", "<b>x</b>", "a\0b", "x" * 5000])
@pytest.mark.parametrize("query", ["preset", "clone", "from_run", "resume"])
def test_an_address_that_names_nothing_opens_a_working_form(page: Any, query: str, name: str) -> None:
    request: Any = SimpleNamespace(query_params={query: name})
    *filled, resumed, banner, force = page.prefill("", request)
    assert [update for update in filled if update != gr.skip()] == [], "the form stays as it was drawn"
    assert (resumed, force["visible"]) == ("", False)
    assert banner["visible"]
    assert 'role="alert"' in banner["value"]
    assert "<b>" not in banner["value"]


class _Greeted:
    """Stands in for the line below the title."""

    def greet(self) -> list[Any]:
        return ["hello", "button"]


@pytest.mark.parametrize("preset", ["", "tiny-full"])
def test_one_answer_opens_the_page_with_the_preview_of_what_its_fields_then_hold(page: Any, preset: str) -> None:
    request: Any = SimpleNamespace(query_params={"preset": preset})
    answer = page.open_page(_Greeted())("", request)
    greeting, filled, rest = answer[:2], answer[2:-10], answer[-10:]
    assert greeting == ["hello", "button"]
    prefilled = page.prefill("", request)
    assert filled[: len(prefilled)] == prefilled
    assert filled[len(prefilled)] == "local"
    command, cards, key = re.sub("<[^>]*>", "", rest[3]), rest[7], rest[8]
    assert f"--preset {preset or 'tiny-lora'}" in command or f"train {preset or 'tiny-lora'}" in command
    assert 'id="strategy-cards"' in cards
    assert key


@pytest.mark.parametrize("offered", [True, False])
def test_a_draft_for_slurm_opens_as_it_was_left_where_slurm_is_offered(page: Any, offered: bool) -> None:
    page.where.offered = offered
    draft = json.dumps({"preset": "tiny-lora", "job": {"on": "slurm", "nodes": "2", "gpus_per_node": "4"}})
    answer = page.open_page(_Greeted())(draft, SimpleNamespace(query_params={}))
    target, *texts = answer[-13 - len(JOB_NAMES) : -13]
    assert target == ("slurm" if offered else "local")
    assert texts[:2] == ["2", "4"]
    assert [part["visible"] for part in answer[-13:-10]] == [not offered, False, offered]
    assert ("--nodes" in answer[-7]) is offered
    assert ("ts-bar" in answer[-3]) is not offered


def test_a_form_that_opens_with_mistakes_says_so_in_place_of_strategies(page: Any) -> None:
    draft = json.dumps({"preset": "tiny-lora", "options": {"learning_rate": "abc"}})
    answer = page.open_page(_Greeted())(draft, SimpleNamespace(query_params={}))
    assert "abc" in answer[-10]
    assert answer[-3:] == [train.note(strategy_parts.NO_JOB), gr.skip(), gr.skip()]


def test_an_address_that_names_a_preset_says_nothing(page: Any) -> None:
    request: Any = SimpleNamespace(query_params={"preset": "tiny-full"})
    *filled, _, banner, _ = page.prefill("", request)
    assert filled[0] == "tiny-full"
    assert not banner["visible"]


@pytest.mark.parametrize(("processes", "can"), [("2", False), ("4", True)])
def test_a_strategy_that_misfits_is_not_said_to_run(page: Any, processes: str, can: bool) -> None:
    values = [component.value for component in page.options]
    panel, note, *_ = page.refresh("", False, "tiny-lora", "hsdp", processes, *values)
    assert ("use at least 4" in panel) is not can
    assert ("Cannot run here" in note) is not can


@pytest.mark.parametrize("too_large", [False, True])
def test_nothing_is_said_to_run_beside_a_mistake_or_a_warning_about_memory(
    page: Any, too_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = Verdict(not too_large, "needs 99 GiB" if too_large else "")
    for where in (train, train_parts):
        monkeypatch.setattr(where, "known_verdict", lambda job: verdict)
    values = [component.value for component in page.options]
    for processes in ("2", "3"):
        panel, note, *_ = page.refresh("", False, "tiny-lora", "fsdp2", processes, *values)
        assert ("16 is not divisible" in panel) == (processes == "3")
        assert ("ts-verdict-good" in panel) == (processes == "2" and not too_large)
        assert "Cannot run here" not in note


def test_bf16_is_no_warning_but_a_line_among_the_numbers(page: Any) -> None:
    def drawn(dtype: str) -> str:
        values = {one.name: component.value for one, component in zip(page.fields, page.options, strict=True)}
        return str(page.refresh("", False, "tiny-lora", "ddp", "2", *{**values, "mixed_precision": dtype}.values())[0])

    assert "ts-alert-warning" not in drawn("bf16")
    assert "<dt>Precision</dt>" in drawn("bf16")
    assert "<dt>Precision</dt>" not in drawn("no")
    assert "ts-alert-warning" in drawn("fp16"), "a warning would be seen"


def test_a_run_that_will_hardly_fit_is_asked_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(train, "gpu_choices", list)
    monkeypatch.setattr(train, "known_verdict", lambda job: None)
    monkeypatch.setattr(train, "memory_verdict", lambda job: Verdict(False, "needs 99 GiB"))
    monkeypatch.setattr(train, "start", started.append)
    here = ServerContext(tmp_path / "runs", (tmp_path,), tmp_path / "uploads", False)
    with gr.Blocks():
        page = train._Form(here)
        page.lay_out()
    first = starting_values("tiny-lora") | {"runs_dir": str(tmp_path / "runs")}
    raw = [component_value(one, first[one.name]) for one in page.fields]
    *_, (_, button, run_id, asked) = page.start("", "", False, "tiny-lora", "", "2", *raw)
    assert (button.value, run_id, asked, started) == (train._LAUNCH_ANYWAY, "", train._LAUNCH_ANYWAY, [])
    *_, (_, _, run_id, asked) = page.start(asked, "", False, "tiny-lora", "", "2", *raw)
    assert (run_id, asked) == (started[0].run.id, "")
    assert page.refresh("", False, "tiny-lora", "", "2", *raw)[-1] == "", "another form is asked about again"


def test_own_data_take_the_presets_evaluation_off_the_form(page: Any) -> None:
    values = {one.name: component.value for one, component in zip(page.fields, page.options, strict=True)}
    named = [box.value for box in page.data_before]
    before = {name: text or "none" for name, text in zip(NAMING, named, strict=True)}
    assert values["eval_dataset_name"] == before["eval_dataset_name"] != "", "there is something to take off"

    def followed(**changes: str) -> tuple[dict[str, str], dict[str, str]]:
        updates = page.follow_data("", "tiny-lora", *named, *{**values, **changes}.values())
        changed = zip(DESCRIBING, updates[len(NAMING) :], strict=True)
        return {name: text or "none" for name, text in zip(NAMING, updates, strict=False)}, {
            name: text for name, text in changed if text != gr.skip()
        }

    assert followed(dataset_name="my.jsonl") == (
        {**before, "dataset_name": "my.jsonl", "eval_dataset_name": "none"}, {"eval_dataset_name": ""},
    )  # fmt: skip
    assert followed(mix="mix.yaml") == (
        {**before, "dataset_name": "none", "mix": "mix.yaml", "eval_dataset_name": "none"},
        {"dataset_name": "", "eval_dataset_name": ""},
    )
    values["dataset_name"] = "my.jsonl"
    resumed = page.follow_data("run", "tiny-lora", *named, *values.values())[len(NAMING) :]
    assert set(map(str, resumed)) == {str(gr.skip())}


def test_another_method_brings_its_presets_values(page: Any) -> None:
    """What was changed by hand stays; and until the form has followed, the preview says what the fields say."""
    values = {one.name: component.value for one, component in zip(page.fields, page.options, strict=True)}
    values |= {"method": "full", "seed": "7"}
    preset, before, *updates = page.switch_method("", "tiny-lora", "", "2", *values.values())
    assert (preset, before) == ("tiny-full", "tiny-full")
    names = [one.name for one in page.fields]
    shown = dict(zip(names, [update["value"] for update in updates[2 : 2 + len(names)]], strict=True))
    assert (shown["method"], shown["learning_rate"], shown["seed"]) == ("full", "0.001", "7")
    job = page._preview("", False, "tiny-lora", "", "2", list(values.values())).job
    assert (job.config.preset, job.config.learning_rate) == ("tiny-full", 0.003)
    followed = page._preview("", False, "tiny-full", "", "2", list(shown.values())).job
    assert followed.config.learning_rate == 0.001
    values["method"] = "qlora"  # of which there is no preset: the field alone changes
    assert set(map(str, page.switch_method("", "tiny-lora", "", "2", *values.values()))) == {str(gr.skip())}
    values["method"] = "full"
    skipped = page.switch_method("a-run", "tiny-lora", "", "2", *values.values())
    assert set(map(str, skipped)) == {str(gr.skip())}, "a run that goes on keeps its preset"


def test_an_address_may_name_the_model_alone(page: Any) -> None:
    request: Any = SimpleNamespace(query_params={"preset": "tiny"})
    assert page.prefill("", request)[0] == "tiny-lora"


def test_a_draft_of_a_run_that_goes_on_keeps_what_is_the_presets_own_value_again(page: Any, tmp_path: Path) -> None:
    """The form starts from the run, not from its preset: `logging_steps` goes from its 5 back to the preset's 1."""
    made_run(tmp_path / "runs", "mine", "stopped", config={"logging_steps": 5, "save_steps": 7})
    request: Any = SimpleNamespace(query_params={"resume": "mine"})
    names = [one.name for one in page.fields]

    def shown(draft: str) -> dict[str, Any]:
        updates = page.prefill(draft, request)[train._DEVICES + 1 :][: len(names)]
        return dict(zip(names, [update["value"] for update in updates], strict=True))

    untouched = shown("")
    assert (untouched["logging_steps"], untouched["save_steps"]) == ("5", "7")
    draft = {
        "preset": "tiny-lora",
        "options": {**untouched, "logging_steps": starting_values("tiny-lora")["logging_steps"]},
    }
    assert shown(json.dumps(draft)) == {**untouched, "logging_steps": "1"}


def test_a_learning_rate_that_rounds_to_nothing_is_no_curve() -> None:
    options = {"learning_rate": "5e-324", "max_steps": "50", "warmup_steps": "100"}
    assert "is 0 at every step" in train_parts.rate_curve(preview(options, "tiny-lora", None, None, "1"))


# -- SLURM -----------------------------------------------------------------------------------------------------------


def test_every_kind_of_value_of_a_job_is_an_option_or_a_mistake(page: Any) -> None:
    values = [component.value for component in page.options]
    texts = dict.fromkeys(SLURM_FIELDS, "")
    for name in SLURM_FIELDS:
        for value in (None, "2", -1, 1.5, True, "x" * 9000, "<b>x</b>", "a\nb", "\ud800", [1], {}):
            job = {**texts, name: value}.values()
            inputs = ["slurm", *job, *NO_MACHINES]
            panel, _, _, command, _, button, _ = page.refresh("", False, "tiny-lora", "", "2", *values, *inputs)
            assert button.value == "Submit to SLURM"
            assert ("#SBATCH" in command) is button.interactive is ("to fix before it can start" not in panel)
            assert "<b>" not in panel + command


def test_anything_else_trains_on_this_machine(page: Any) -> None:
    values = [component.value for component in page.options]
    for target in (None, "", "local", 3, [], "SLURM"):
        answer = page.refresh("", False, "tiny-lora", "", "2", *values, target, *[""] * len(JOB_NAMES[1:]))
        assert answer[5].value == "Start training"
        assert "#SBATCH" not in answer[3]
        assert [part["visible"] for part in page.where.switch(target)] == [True, False, False]
    assert [part["visible"] for part in page.where.switch("slurm")] == [False, False, True]


def test_a_run_that_is_resumed_stays_where_it_was(page: Any) -> None:
    assert page.where.keep_target("a-run") == gr.update(visible=False, value="local")
    assert page.where.keep_target("")["visible"] is True


# -- several machines ------------------------------------------------------------------------------------------------


def test_every_kind_of_value_of_several_machines_is_an_option_or_a_mistake(page: Any) -> None:
    values = [component.value for component in page.options]
    good = {**machines_texts(Path("runs")), "main_process_ip": "127.0.0.1"}
    no_job = [""] * len(SLURM_FIELDS)

    def refresh(**changes: Any) -> list[Any]:
        texts = {**good, **changes}.values()
        return page.refresh("", False, "tiny-lora", "", "2", *values, "machines", *no_job, *texts)

    panel, _, _, command, _, button, _ = refresh()
    assert button.interactive
    line = re.sub("<[^>]*>", "", command)
    assert "--num_processes 4 --num_machines 2 --machine_rank 0 --main_process_ip 127.0.0.1 --main_process_port" in line
    assert "CPU process" in panel
    for name in MACHINES_FIELDS:
        for value in (None, -1, 1.5, True, "x" * 9000, "<b>x</b>", "a\nb", "\ud800", {}, "0", "999999", "\u0661"):
            panel, _, _, command, _, button, _ = refresh(**{name: value})
            accepted = name == "min_machines" and value in (None, {})  # both are blank
            assert button.interactive is accepted is ("to fix before it can start" not in panel), (name, value)
            assert "<b>" not in panel + command
    assert "all machines must see the run folder" in refresh(shared_folder="no")[0]


def test_a_port_in_use_and_an_address_elsewhere_are_named(page: Any) -> None:
    values = [component.value for component in page.options]

    def panel(**changes: str) -> str:
        texts = {**machines_texts(Path("runs")), "main_process_ip": "127.0.0.1", **changes}.values()
        inputs = ["machines", *[""] * len(SLURM_FIELDS), *texts]
        return str(page.refresh("", False, "tiny-lora", "", "2", *values, *inputs)[0])

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        problem = f"main_process_port={port} cannot be opened on this machine: Address already in use; use another"
        assert problem in panel(main_process_port=port)
    assert "to fix" not in panel(main_process_port=port), "control"
    assert "is no address of this machine" in panel(main_process_ip="192.0.2.1"), "of documentation"
