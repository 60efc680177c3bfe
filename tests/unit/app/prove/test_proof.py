"""`tunesmith prove`: the comparison and its controls, what is refused, what cannot run, what is shown and kept."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.cli import run_verb
from app.console import clean
from app.launch.foreground import CheckBroke
from app.launch.job import TrainJob
from app.prove.command import exit_status
from app.prove.proof import BF16_TOLERANCE, TOLERANCE, Curve, compare, held_folder
from app.prove.report import markdown
from app.runs.runs import list_runs
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder, read_json, register_outside, registered_runs
from trainers.run.unfinished import held_alone
from trainers.strategy.strategy import Strategy

pytestmark = pytest.mark.usefixtures("elsewhere")

RIGHT: Curve = {1: (2.0, 1.0), 2: (1.5, 0.5), 3: (1.0, 0.25)}
KEYS = ["strategy", "world_size", "method", "max_loss_difference", "max_grad_norm_difference", "bit_equal_steps",
        "passed", "reason"]  # fmt: skip


def changed(**steps: tuple[Any, Any]) -> Curve:
    """The right curve with these steps replaced: `s2=(loss, norm)`."""
    return RIGHT | {int(name[1:]): values for name, values in steps.items()}


# -- the comparison --------------------------------------------------------------------------------------------------


def test_the_same_bits_pass() -> None:
    found = compare(RIGHT, dict(RIGHT), 3)
    assert (found.loss, found.norm, found.bit_equal, found.passed) == (0.0, 0.0, 3, True)


def test_small_differences_pass_and_are_told() -> None:
    found = compare(RIGHT, changed(s2=(1.5 + 9e-6, 0.5 + 4e-5), s3=(1.0 - 2e-6, 0.25)), 3)
    assert found.passed
    assert found.loss == pytest.approx(9e-6)
    assert found.norm == pytest.approx(8e-5), "relative to the reference"
    assert found.bit_equal == 1


@pytest.mark.parametrize(
    ("curve", "reason"),
    [
        (changed(s2=(1.5 + 2e-5, 0.5)), "the loss differs by 2e-05 at step 2, at most 1e-05"),
        (changed(s3=(1.0, 0.25 - 5e-5)), "the gradient norm differs by 0.0002 at step 3, at most 0.0001"),
        (changed(s1=(None, 1.0)), "the loss of step 1 is not finite"),
        (changed(s1=(math.nan, 1.0)), "the loss of step 1 is not finite"),
        (changed(s3=(1.0, math.inf)), "the gradient norm of step 3 is not finite"),
        ({1: RIGHT[1], 3: RIGHT[3]}, "logged 2 of 3 steps; the first missing one is step 2"),
        ({}, "logged 0 of 3 steps"),
    ],
)
def test_what_is_wrong_does_not_pass(curve: Curve, reason: str) -> None:
    """Controls: each of these is one step off."""
    found = compare(RIGHT, curve, 3)
    assert not found.passed
    assert reason in str(found.fault or found.apart)


def test_a_gradient_norm_of_zero_is_no_division() -> None:
    assert compare({1: (1.0, 0.0)}, {1: (1.0, 0.0)}, 1).passed
    assert not compare({1: (1.0, 0.0)}, {1: (1.0, 1e-9)}, 1).passed


def test_in_bf16_the_first_step_shows_what_later_rounding_would_hide() -> None:
    rounded = changed(s2=(1.5 + 5e-3, 0.5 * 1.05), s3=(1.0, 0.25 * 1.02))
    assert not compare(RIGHT, rounded, 3).passed
    assert compare(RIGHT, rounded, 3, tolerance=BF16_TOLERANCE, at_first=TOLERANCE).passed
    fault = rounded | {1: (2.0, 1.0024)}  # of the mean of means, as measured
    assert compare(RIGHT, fault, 3, tolerance=BF16_TOLERANCE).passed, "under tp rounding is as large"
    found = compare(RIGHT, fault, 3, tolerance=BF16_TOLERANCE, at_first=TOLERANCE)
    assert found.apart == "the gradient norm differs by 0.0024 at step 1, at most 0.0001"


# -- the verb --------------------------------------------------------------------------------------------------------


class Launcher:
    """Stands in for the launch: writes what a run leaves behind.

    Args:
        curves: what the runs of a name log; others log the right curve.
        ends: state and cause of the runs of a name; others are done.
    """

    def __init__(self, curves: dict[str, Curve] | None = None, ends: dict[str, tuple[str, str]] | None = None):
        self.curves, self.ends = curves or {}, ends or {}
        self.trained: list[str] = []
        self.listed: list[bool] = []

    def __call__(self, job: TrainJob, display: object, outer: object = None, bound: bool = False) -> dict[str, Any]:
        run, name = job.run, job.run.id
        run.create()
        self.trained.append(name)
        self.listed.append(registered_runs() == [run.path])
        rows = [{"step": step, "loss": loss, "grad_norm": norm}
                for step, (loss, norm) in self.curves.get(name, RIGHT).items()]  # fmt: skip
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for path in (run.checkpoints / "step-00000003" / "manifest.json", run.model / "model.safetensors"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text('{"data_fingerprint": "abc"}')
        register_outside(run, job.config.runs_dir)
        state, cause = self.ends.get(name, ("done", None))
        return run.write_state(state=state, cause=cause, step=2, export_dir=str(run.model))


@pytest.fixture
def prove(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Runs the verb with a stand-in for the launcher; gives status and document."""

    def call(launcher: Launcher, *words: str, strategies: str = "single,ddp") -> tuple[int, Any]:
        monkeypatch.setattr("app.prove.proof.launch", launcher)
        monkeypatch.setattr("app.prove.proof.preflight", getattr(launcher, "preflight", lambda job, quiet: None))
        status = run_verb(["prove", "--strategies", strategies, "--steps", "3", *words, "--json"])
        shown = capsys.readouterr()
        return status, json.loads(shown.out)

    return call


Prove = Callable[..., tuple[int, Any]]


def test_all_rows_pass(prove: Prove) -> None:
    launcher = Launcher()
    status, document = prove(launcher, strategies="single,ddp,fsdp2_offload")
    assert status == 0
    assert launcher.trained == ["reference", "single", "ddp"]
    assert launcher.listed == [True] * 3, "a run that lives is found by lists, also when prove is killed"
    assert [list(row)[:8] for row in document["rows"]] == [KEYS] * 3
    assert [row["passed"] for row in document["rows"]] == [True, True, None]
    assert [row["bit_equal_steps"] for row in document["rows"]] == [3, 3, None]
    assert "needs an accelerator" in document["rows"][2]["reason"]
    assert document["reference"]["losses"] == [2.0, 1.5, 1.0]
    assert (document["steps"], document["control"], document["data_fingerprint"]) == (3, None, "abc")
    assert document["tolerance"] == {"loss": 1e-5, "grad_norm": 1e-4}
    assert {"model.safetensors", "config.json"} <= set(document["base_model"]["sha256"])


def test_the_report_stays_and_the_weights_go(prove: Prove) -> None:
    _, document = prove(Launcher())
    folder = Path(document["report_dir"])
    assert folder.parent.name == "runs"
    assert folder.name.startswith("prove-")
    assert read_json(folder / "report.json") == document
    assert "| ddp | 2 | 0 | 0 | 3 | pass |  |" in (folder / "report.md").read_text()
    assert "preset: tiny-full" in (folder / "config.yaml").read_text()
    for name in ("reference", "single", "ddp"):
        run = RunFolder(folder / name)
        assert run.metrics.exists()
        assert not run.checkpoints.exists()
        assert not run.model.exists()
        assert (run.read_state() or {})["export_dir"] is None
    assert list_runs(Path("runs")) == registered_runs() == []


@pytest.mark.parametrize(
    ("curve", "reason"),
    [(changed(s2=(1.5 + 2e-5, 0.5)), "differs by 2e-05"), (changed(s2=(None, 0.5)), "not finite"),
     ({1: RIGHT[1]}, "logged 1 of 3")],
)  # fmt: skip
def test_a_row_that_is_off_fails(curve: Curve, reason: str, prove: Prove) -> None:
    status, document = prove(Launcher({"ddp": curve}))
    assert status == 1
    assert [row["passed"] for row in document["rows"]] == [True, False]
    assert reason in document["rows"][1]["reason"]


def test_a_row_that_breaks_fails_with_its_cause(prove: Prove) -> None:
    status, document = prove(Launcher(ends={"ddp": ("failed", "rank 1: ValueError: bad row")}))
    assert status == 1
    assert (document["rows"][1]["passed"], document["rows"][1]["reason"]) == (False, "rank 1: ValueError: bad row")


def test_a_rerun_must_have_the_same_bits(prove: Prove) -> None:
    nearly = changed(s2=(1.5 + 1e-9, 0.5))
    status, document = prove(Launcher({"single": nearly, "ddp": nearly}))
    assert status == 1
    assert [row["passed"] for row in document["rows"]] == [False, True]
    assert "2 of 3 steps are" in document["rows"][0]["reason"]


def test_without_a_reference_nothing_is_judged(prove: Prove) -> None:
    launcher = Launcher(ends={"reference": ("failed", "out of memory")})
    status, document = prove(launcher)
    assert (status, launcher.trained) == (1, ["reference"])
    assert [row["passed"] for row in document["rows"]] == [None, None]
    assert document["rows"][0]["reason"] == "not run: the reference failed: out of memory"


def test_what_the_check_refuses_cannot_run(prove: Prove) -> None:
    class Checking(Launcher):
        def preflight(self, job: TrainJob, quiet: bool) -> None:
            if job.run.id == "ddp":
                raise ConfigError("method=odd is refused under ddp; use single")

    status, document = prove(Checking())
    assert status == 0
    assert (document["rows"][1]["passed"], document["rows"][1]["reason"][:10]) == (None, "method=odd")


def test_a_check_that_crashes_is_a_failure(prove: Prove) -> None:
    class Crashing(Launcher):
        def preflight(self, job: TrainJob, quiet: bool) -> None:
            if job.run.id == "ddp":
                raise CheckBroke("the check broke off", "")

    status, document = prove(Crashing(), "--control", "mean-of-means")
    assert (status, document["rows"][1]["passed"]) == (1, False)
    assert document["control"] == {"fault": "mean-of-means", "seen": 0, "rows": 2}


def test_nothing_that_can_run_proves_nothing(prove: Prove) -> None:
    launcher = Launcher()
    status, document = prove(launcher, strategies="fsdp2_offload")
    assert (status, launcher.trained) == (1, [])
    assert not Path(document["report_dir"]).exists()


def test_an_interruption_reports_what_was_done(prove: Prove) -> None:
    status, document = prove(Launcher(ends={"ddp": ("stopped", "stopped at step 2: a stop request")}))
    assert (status, document["interrupted"]) == (130, True)
    assert [row["passed"] for row in document["rows"]] == [True, None]
    assert "interrupted" in document["rows"][1]["reason"]
    assert read_json(Path(document["report_dir"]) / "report.json") == document
    assert not (Path(document["report_dir"]) / "ddp" / "checkpoints").exists()


def test_an_interruption_promises_no_resume(prove: Prove) -> None:
    cause = "stopped by SIGINT at step 2 of 3; its checkpoint is saved; resume goes on from there"
    _, document = prove(Launcher(ends={"ddp": ("stopped", cause)}))
    reason = document["rows"][1]["reason"]
    assert reason == "interrupted: stopped at step 2; prove keeps no checkpoint of it, run prove again"
    assert "resume" not in reason + str(read_json(Path(document["report_dir"]) / "ddp" / "state.json"))


def test_a_control_is_good_when_every_row_sees_it(prove: Prove, capsys: pytest.CaptureFixture[str]) -> None:
    off = changed(s3=(1.0, 0.3))
    status, document = prove(Launcher({"single": off, "ddp": off}), "--control", "mean-of-means")
    assert (status, document["control"]) == (0, {"fault": "mean-of-means", "seen": 2, "rows": 2})
    assert [row["passed"] for row in document["rows"]] == [False, False]
    status, document = prove(Launcher({"single": off}), "--control", "mean-of-means")
    assert (status, document["control"]) == (1, {"fault": "mean-of-means", "seen": 1, "rows": 2})
    assert run_verb(["prove", "--strategies", "single,ddp", "--steps", "3", "--control", "mean-of-means"]) == 1
    shown = capsys.readouterr().out
    assert "fault seen" in shown
    assert "NOT SEEN" in shown
    assert "control: the test saw the fault in 1 of 2 rows" in shown


def test_a_crash_is_not_the_fault_that_was_looked_for(prove: Prove) -> None:
    launcher = Launcher(ends={"ddp": ("failed", "rank 1 fell")}, curves={"single": changed(s3=(1.0, 0.3))})
    status, document = prove(launcher, "--control", "mean-of-means")
    assert (status, document["control"]["seen"], document["control"]["rows"]) == (1, 1, 2)


def test_the_warnings_of_a_row_are_said_and_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("app.prove.proof.launch", Launcher())
    monkeypatch.setattr("app.prove.proof.preflight", lambda job, quiet: None)
    monkeypatch.setattr(Strategy, "outside_parity", lambda self: ["x=bf16"] if self.name == "ddp" else [])
    assert run_verb(["prove", "--strategies", "single,ddp", "--steps", "3", "--quiet", "--json"]) == 0
    shown = capsys.readouterr()
    line = "outside the promise that the strategy never changes the model: x=bf16"
    document = json.loads(shown.out)
    assert shown.err.splitlines() == [f"warning: ddp: {line}"]
    assert [row["warnings"] for row in document["rows"]] == [[], [line]]
    assert f"- warning: ddp: {line}" in (Path(document["report_dir"]) / "report.md").read_text()


def test_people_get_a_table_and_what_was_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("app.prove.proof.launch", Launcher({"ddp": changed(s2=(1.5 + 4e-6, 0.5))}))
    monkeypatch.setattr("app.prove.proof.preflight", lambda job, quiet: None)
    assert run_verb(["prove", "tiny-lora", "--strategies", "single,ddp", "--steps", "3", "--tf32", "true"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].split("  ")[0] == "strategy"
    assert lines[2].split() == ["ddp", "2", "4e-06", "0", "2", "pass"]
    assert "2 of 2 rows match one process" in shown.out
    assert "are deleted" in shown.out
    assert "prove sets tf32=false instead of true" in shown.err
    assert "[3/3] ddp on 2 CPU processes" in shown.err


def test_a_terminal_gets_the_table_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("app.prove.proof.launch", Launcher())
    monkeypatch.setattr("app.prove.proof.preflight", lambda job, quiet: None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run_verb(["prove", "--strategies", "ddp", "--steps", "3", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert "loss diff" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize("width", [50, 80])
def test_a_narrow_terminal_shows_whole_names_and_reasons_below(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("app.prove.proof.launch", Launcher())
    monkeypatch.setattr("app.prove.proof.preflight", lambda job, quiet: None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    assert run_verb(["prove", "--strategies", "fsdp1_grad_op,fsdp2,fsdp2_offload", "--steps", "3", "--quiet"]) == 0
    lines = clean(capsys.readouterr().out).splitlines()
    table = lines[: lines.index("")]
    assert all(len(line) <= width for line in table[:5])
    assert [line.split()[0] for line in table[2:5]] == ["fsdp1_grad_op", "fsdp2", "fsdp2_offload"]
    assert table[5].startswith("fsdp2_offload: fsdp_offload_params=true uses pinned memory")
    assert len(table) == 6


@pytest.mark.parametrize(
    ("passed", "status"), [([True, None], 0), ([True, False], 1), ([None, None], 1), ([], 1), ([True], 0)]
)
def test_exit_status(passed: list[bool | None], status: int) -> None:
    document = {"interrupted": False, "control": None, "rows": [{"passed": one} for one in passed]}
    assert exit_status(document) == status
    assert exit_status(document | {"interrupted": True}) == 130
    assert exit_status(document | {"control": {"fault": "x", "seen": 0, "rows": 0}}) == 1


def test_a_reason_cannot_break_the_table() -> None:
    row = dict.fromkeys(KEYS) | {"strategy": "ddp", "world_size": 2, "reason": "a | b\nc", "passed": False}
    document = {"rows": [row], "reference": {"strategy": "single", "cause": None}, "steps": 1, "command": ["x"],
                "control": None, "interrupted": False, "tolerance": {"loss": 1e-5, "grad_norm": 1e-4},
                "global_batch_size": 1, "per_device_train_batch_size": 1, "overrides": []}  # fmt: skip
    assert "| FAIL | a \\| b c |" in markdown(document)


@pytest.mark.parametrize("width", ["60", "120"])
def test_the_help_names_what_is_set(width: str, monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", width)
    assert run_verb(["prove", "-h"]) == 0
    words = set(capsys.readouterr().out.replace(",", " ").split())
    assert {"--strategies", "--steps", "--layers", "--control", "--json", "--learning_rate", "mixed_precision"} <= words
    assert not {"--strategy", "--mixed_precision", "--max_steps"} & words


# -- resume ----------------------------------------------------------------------------------------------------------


class Saving(Launcher):
    """Leaves a checkpoint in the middle too, and logs what comes after it in a run that goes on from one."""

    def __call__(self, job: TrainJob, display: object, outer: object = None, bound: bool = False) -> dict[str, Any]:
        state = super().__call__(job, display, outer, bound)
        (job.run.checkpoints / "step-00000001").mkdir(exist_ok=True)
        if job.resume_from:
            assert Path(job.resume_from).is_dir(), "it is kept until all have gone on from it"
            rows = [row for row in map(json.loads, job.run.metrics.read_text().splitlines()) if row["step"] > 1]
            job.run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return state


def test_every_strategy_goes_on_from_every_other(prove: Prove) -> None:
    launcher = Saving()
    status, document = prove(launcher, "--resume", strategies="single,ddp,ddp:4")
    assert status == 0
    pairs = [(row["from"], row["to"]) for row in document["rows"]]
    names = ["single", "ddp", "ddp:4"]
    assert pairs == [(first, second) for first in names for second in names]
    assert [(row["world_size"], row["passed"], row["bit_equal_steps"]) for row in document["rows"][:3]] == [
        (1, True, 2), (2, True, 2), (4, True, 2),
    ]  # fmt: skip
    assert launcher.trained[:5] == ["reference", "single", "single-to-single", "single-to-ddp", "single-to-ddp-4"]
    folder = Path(document["report_dir"])
    assert not list(folder.rglob("step-*"))
    report = (folder / "report.md").read_text()
    assert "| from \\ to | single | ddp | ddp:4 |" in report
    assert "| ddp -> ddp:4 | 4 | 0 | 0 | 2 | pass |  |" in report
    assert document["resumed_at"] == 1


def test_on_its_own_topology_every_bit_must_be_the_same(prove: Prove) -> None:
    """Control: a bit that would pass under another strategy."""
    bit = (math.nextafter(1.5, 2), 0.5)
    status, document = prove(Saving({"ddp-to-ddp": changed(s2=bit), "ddp-to-single": changed(s2=bit)}), "--resume")
    assert status == 1
    found = {(row["from"], row["to"]): row for row in document["rows"]}
    assert found["ddp", "single"]["passed"]
    assert not found["ddp", "ddp"]["passed"]
    assert "must be bit-identical; 1 of 2 steps are" in found["ddp", "ddp"]["reason"]


def test_on_its_own_topology_the_weights_must_be_the_same(prove: Prove) -> None:
    """Control: the curve is the same, the exported weights are not."""

    class Other(Saving):
        def __call__(self, job: TrainJob, display: object, outer: object = None, bound: bool = False) -> dict[str, Any]:
            state = super().__call__(job, display, outer, bound)
            if job.run.id == "ddp-to-ddp":
                (job.run.model / "model.safetensors").write_text("other weights")
            return state

    status, document = prove(Other(), "--resume")
    assert status == 1
    assert [row["passed"] for row in document["rows"]] == [True, True, True, False]
    assert "the exported weights differ" in document["rows"][3]["reason"]


def test_a_strategy_that_falls_takes_its_row_with_it(prove: Prove) -> None:
    status, document = prove(Saving(ends={"ddp": ("failed", "out of memory")}), "--resume")
    assert status == 1
    assert [row["passed"] for row in document["rows"]] == [True, True, False, False]
    assert document["rows"][2]["reason"] == "ddp itself: out of memory"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--steps", "1"], "steps=1 has no middle"),
        (
            ["--control", "mean-of-means", "--global_batch_size", "8"],
            "control=mean-of-means is not a fault of a resume",
        ),
        (["--strategies", "single:2"], "strategy single:2: distributed_type='NO' is one process"),
        (["--strategies", "ddp,ddp:0"], "strategy ddp:0: num_processes=0 is refused; write at least 1"),
    ],
)
def test_what_resume_refuses(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [] if "--strategies" in words else ["--strategies", "single"]
    assert run_verb(["prove", "--resume", *given, *words]) == 2
    assert line in capsys.readouterr().err


# -- the folder --------------------------------------------------------------------------------------------------------


def test_two_proofs_do_not_share_a_folder(prove: Prove, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "report"
    folder.mkdir()
    argv = ["--output_dir", str(folder)]
    refused = ["prove", "--strategies", "single", *argv]
    with held_alone(folder, "another proof"):
        assert run_verb(refused) == 2
    assert f"output_dir={folder} holds a proof that is running; name a new folder" in capsys.readouterr().err
    assert list(folder.iterdir()) == []
    assert prove(Launcher(), *argv)[0] == 0, "control: the lock has ended"
    assert run_verb(refused) == 2
    assert "holds other files" in capsys.readouterr().err


def test_a_proof_that_was_planned_at_the_same_time_finds_the_folder_used(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    with held_folder(folder):
        (folder / "report.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds other files"), held_folder(folder):
        pytest.fail("it would overwrite the other's report")
    with held_folder(tmp_path / "unused"):
        assert (tmp_path / "unused").is_dir()
    assert not (tmp_path / "unused").exists(), "what writes nothing leaves nothing"
