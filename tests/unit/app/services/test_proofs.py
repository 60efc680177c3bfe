"""What may be proved, the process that proves it, and the verdict as the page and `runs show` tell it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli import run_verb
from app.launch import background_work
from app.prove.plan import PROVE, make_plan
from app.runs.proofs import PROOFS
from app.services import proofs as service
from tests.made_runs import add_proof, made_run, proof_document
from trainers.config.mistakes import ConfigError
from trainers.config.yaml_file import read_yaml
from trainers.run.device_locks import Holder, Need, cpu_slots, take_now
from trainers.run.folder import RunFolder
from ui.pages.run_proof import proof_parts

pytestmark = pytest.mark.usefixtures("elsewhere")
HOSTILE = "<img src=x onerror=alert(1)>"
SLEEPS = (
    "import json, os, sys, time; print(json.dumps(sys.argv[1:]), os.environ.get('HF_TOKEN'), flush=True); "
    "time.sleep(60)"
)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of `prove`, a program that prints its arguments and sleeps."""
    monkeypatch.setattr(
        background_work, "module_argv", lambda module, words: [sys.executable, "-I", "-S", "-c", SLEEPS, *words]
    )


# -- what may be proved ------------------------------------------------------------------------------------------------


def changed(path: Path, **values: Any) -> None:
    path.write_text(yaml.safe_dump({**read_yaml(path), **values}), encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda run: run.config.unlink(), "it has no config.yaml and accelerate.yaml"),
        (lambda run: run.accelerate.unlink(), "it has no config.yaml and accelerate.yaml"),
        (lambda run: run.config.write_text("a: [1"), "config.yaml"),
        (lambda run: changed(run.accelerate, num_machines=2), "it trains on 2 machines, and a proof uses one"),
        (lambda run: changed(run.accelerate, num_processes=1, distributed_type="NO"), "it trains in one process"),
        (lambda run: changed(run.config, resume_from_checkpoint="auto"), "it starts from a checkpoint"),
    ],
)
def test_what_cannot_be_proved_is_refused_and_nothing_is_left(spoil: Callable[[RunFolder], None], reason: str) -> None:
    run = made_run(Path("runs"), "a-run")
    assert service.refusal(run) == ""
    spoil(run)
    assert reason in service.refusal(run)
    with pytest.raises(ConfigError, match="run a-run cannot be proved: "):
        service.start(run)
    assert not (run.path / "proofs").exists()
    status, results = proof_parts(run)
    assert "This run cannot be proved: " in status
    assert status.endswith("<!---->")
    assert results == ""


def test_a_comma_in_the_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="its path has a comma, which separates strategies"):
        service.start(made_run(Path("runs"), "a,b"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 3, "per_device_train_batch_size": 1}, "global_batch_size=3 is not divisible"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_prove_refuses_is_refused_before_anything_is_written(options: dict[str, Any], message: str) -> None:
    run = made_run(Path("runs"), "a-run")
    changed(run.config, **options)
    with pytest.raises(ConfigError, match=message):
        service.start(run)
    assert not (run.path / "proofs").exists()


@pytest.mark.usefixtures("sleeper")
def test_devices_in_use_are_refused_with_the_name_of_their_holder() -> None:
    run = made_run(Path("runs"), "a-run", world=len(cpu_slots()))
    with take_now(Need(cpu_slots=1), Holder("other-run")):
        if len(cpu_slots()) > 1:
            with pytest.raises(
                ConfigError, match=r"are in use \(cpu-0 held by other-run\); prove it once they are free"
            ):
                service.start(run)
            assert not (run.path / "proofs").exists()
        changed(run.config, share_gpus=True)
        service.start(run)
    service.stop(run)


def test_the_arguments_are_those_of_the_run() -> None:
    run = made_run(Path("runs"), "a-run")
    words = ["--config", str(run.config), "--strategies", str(run.accelerate), "--num_processes", "2"]
    assert service.arguments(run) == words
    assert service.arguments(run, control=True) == [*words, "--control", "mean-of-means"]
    run.command.write_text("CUDA_VISIBLE_DEVICES=0,3 python train.py\n")
    assert service.arguments(run)[-2:] == ["--gpus", "0,3"]
    args = PROVE.read(words)
    assert args is not None
    (row,) = make_plan(args).rows
    assert (row.strategy, row.world_size, row.reason) == ("ddp", 2, None)


# -- the process -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sleeper")
def test_a_proof_is_a_process_of_its_own_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    run = made_run(Path("runs"), "a-run")
    proof = service.start(run, control=True)
    assert PROOFS.running(run) == proof
    process = proof.process()
    assert process is not None
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    until(proof.output.read_text)
    words, _, secret = proof.output.read_text().strip().rpartition(" ")
    assert secret == os.environ["HF_TOKEN"], "it comes by the environment"
    assert json.loads(words) == ["prove", *service.arguments(run, control=True), "--output_dir", str(proof.report)]
    assert "hf_secret" not in (proof.path / "proof.json").read_text()
    (entry,) = service.newest(run)
    assert (entry["running"], entry["control"], entry["doing"]) == (True, True, "checking data and model")
    status, results = proof_parts(run)
    assert status.endswith("<!--stop-->")
    assert ("With a known fault: checking data and model" in status, results) == (True, "")
    with pytest.raises(ConfigError, match="a proof of run a-run is running"):
        service.start(run)
    service.stop(run)
    until(lambda: PROOFS.running(run) is None)
    assert not process.alive()
    (entry,) = service.entries(run)
    assert (entry["running"], entry["sentence"]) == (False, "No verdict: it was stopped.")
    with pytest.raises(ConfigError, match="no proof of run a-run is running"):
        service.stop(run)
    assert [entry.number for entry in PROOFS.of(run)] == [1]


@pytest.mark.usefixtures("sleeper")
def test_a_killed_proof_is_not_running_and_the_next_one_starts() -> None:
    run = made_run(Path("runs"), "a-run")
    proof = service.start(run)
    process = proof.process()
    assert process is not None
    until(proof.output.read_text)
    os.killpg(process.pid, signal.SIGKILL)
    until(lambda: PROOFS.running(run) is None)
    assert service.newest(run)[0]["sentence"].startswith("No verdict: it ended early; its last line is: [")
    assert service.start(run).number == 2
    service.stop(run)


@pytest.mark.usefixtures("sleeper")
def test_a_proof_of_another_machine_is_not_stopped_from_here() -> None:
    run = made_run(Path("runs"), "a-run")
    proof = service.start(run)
    note = proof.note()
    proof.write_note({**note, "host": "elsewhere"})
    with pytest.raises(ConfigError, match="stop it on elsewhere"):
        service.stop(run)
    proof.write_note(note)
    service.stop(run)


# -- the verdict -------------------------------------------------------------------------------------------------------


def ended(document: Any, control: bool = False, output: str = "") -> RunFolder:
    """A run with a proof that left this report."""
    run = made_run(Path("runs"), "a-run")
    add_proof(run, document, 1, control, output)
    return run


NAME = "ddp on 2 processes"


@pytest.mark.parametrize(
    ("document", "control", "verdict", "sentence"),
    [
        (proof_document(True), False, "agrees", f"{NAME} trains the same model as one process."),
        (proof_document(False, 0.1, row={"reason": "the loss differs"}), False, "differs",
         f"{NAME} does not train the same model as one process: the loss differs."),
        (proof_document(False, 0.1), False, "differs", f"{NAME} does not train the same model as one process."),
        (proof_document(False, norm=0.1, row={"reason": "x"}), False, "differs",
         f"{NAME} does not train the same model as one process: x."),
        (proof_document(False, row={"reason": "rank 1: out of memory"}), False, "failed",
         f"{NAME} did not train as one process did: rank 1: out of memory."),
        (proof_document(False, None, None, row={"reason": "it crashed"}), True, "failed",
         f"{NAME} did not train as one process did: it crashed."),
        (proof_document(False, 0.1, row={"reason": "x", "fault_seen": True}), True, "fault seen",
         f"A known fault in {NAME} is seen, so the comparison can fail."),
        (proof_document(True, row={"fault_seen": False}), True, "fault not seen",
         f"A known fault in {NAME} is not seen, so a proof says nothing here."),
        (proof_document(None, row={"reason": "not run"}, reference={"cause": "out of memory."}), False, None,
         "No verdict: the single process failed: out of memory."),
        (proof_document(None, row={"reason": "no g++ here"}), False, None, "No verdict: no g++ here."),
        (proof_document(None), False, None, "No verdict: it ended early."),
        (proof_document(None, interrupted=True), False, None, "No verdict: it was stopped."),
        (None, False, None, "No verdict: it ended early."),
    ],
)  # fmt: skip
def test_the_verdict_in_words(document: Any, control: bool, verdict: str | None, sentence: str) -> None:
    run = ended(document, control)
    (entry,) = service.entries(run)
    assert (entry["verdict"], entry["sentence"], entry["control"]) == (verdict, sentence, control)
    _, results = proof_parts(run)
    kind = {"agrees": "good", "fault seen": "good", None: "warning"}.get(verdict, "error")
    assert f'ts-alert-{kind}"' in results
    assert sentence in results


def test_why_a_proof_left_no_report_is_its_last_line() -> None:
    run = ended(None, output=f"prove sets x\nerror: the data is missing: {HOSTILE}\n\n")
    assert service.newest(run)[0]["sentence"] == f"No verdict: the data is missing: {HOSTILE}."
    _, results = proof_parts(run)
    assert HOSTILE not in results
    assert "&lt;img" in results


def test_numbers_times_and_files_are_shown_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    run = ended(proof_document(True), output="[1/2] reference")
    status, results = proof_parts(run)
    assert status.endswith("<!--prove control-->")
    for text in ("4e-08", "3 of 20 steps identical", "2026-11-20 08:00 UTC", "took 30 s", "# Does the strategy",
                 "[1/2] reference", f"tunesmith prove --config {run.config}"):  # fmt: skip
        assert text in results, text
    assert run_verb(["runs", "show", "a-run"]) == 0
    line = f"proof 1: {NAME} trains the same model as one process. Largest differences: loss 4e-08 (at most 1e-05)"
    assert line in capsys.readouterr().out
    assert run_verb(["runs", "show", "a-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["proofs"] == service.entries(run)
    memory = [(row["rank"], row["measured_gib"], row["planned_gib"]) for row in document["memory"]["rows"]]
    assert memory == [(0, 1.4, None), (1, 1.35, None)]


def test_the_newest_of_each_kind_is_shown() -> None:
    run = ended(proof_document(True))
    for number, control in ((2, True), (3, False), (4, False)):
        add_proof(run, None, number, control)
    add_proof(run, proof_document(True, loss=0), 5)
    assert [entry["number"] for entry in service.newest(run)] == [5, 2]
    add_proof(run, None, 6)
    assert [entry["number"] for entry in service.newest(run)] == [6, 5, 2], "a verdict outlives a proof without one"
    _, results = proof_parts(run)
    assert results.index("Proof 6, ") < results.index("Proof 5, ") < results.index("Proof 2, ")
    assert [entry["number"] for entry in service.entries(run)] == [6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize(
    "value", [None, True, -1, 7.5, 1e999, float("nan"), "x", HOSTILE, [], [[]], {}, {"loss": []}, "\ud800"]
)
def test_a_report_may_hold_anything(value: Any) -> None:
    names = ("steps", "rows", "tolerance", "interrupted", "reference")
    good = proof_document(True)
    row = dict.fromkeys(good["rows"][0], value) | {"fault_seen": value}
    limits = {"loss": value, "grad_norm": value}
    documents = [value, dict.fromkeys(names, value), *(good | part for part in (
        {"rows": [value]}, {"rows": [row]}, {"tolerance": limits}, {"rows": [row], "tolerance": limits},
    ))]  # fmt: skip
    for number, document in enumerate(documents):
        run = made_run(Path("runs"), f"run-{number}")
        proof = add_proof(run, None)
        proof.report.joinpath("report.json").write_text(json.dumps(document))
        proof.path.joinpath("proof.json").write_text(json.dumps(dict.fromkeys(proof.note(), value)))
        json.dumps(service.entries(run), allow_nan=False)
        assert HOSTILE not in "".join(proof_parts(run))
        assert all(map(service.proof_line, service.entries(run)))
