"""`tunesmith prove`: the comparison and its controls, what is refused, what cannot run, what is shown and kept."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli import run_verb
from app.console import clean
from app.hardware import Gpu
from app.prove import Curve, compare, exit_status
from app.prove_plan import SETTINGS, Plan, _Asked, _known, _overrides, make_plan, micro_batch
from app.prove_report import markdown
from app.request import Job, sort_words
from app.runs import list_runs
from app.training import CheckBroke
from trainers.config import ConfigError, build
from trainers.options import Request
from trainers.run_folder import RunFolder, read_json, register_outside, registered_runs
from trainers.strategies import Strategy, load_strategy

RIGHT: Curve = {1: (2.0, 1.0), 2: (1.5, 0.5), 3: (1.0, 0.25)}
KEYS = ["strategy", "world_size", "method", "max_loss_difference", "max_grad_norm_difference", "bit_equal_steps",
        "passed", "reason"]  # fmt: skip


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


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
        ({1: RIGHT[1], 3: RIGHT[3]}, "logged 2 of 3 steps; the first that is missing is step 2"),
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


# -- the plan --------------------------------------------------------------------------------------------------------


def plan(*words: str) -> Plan:
    return make_plan(sort_words(words))


def test_the_plan_takes_out_what_leaves_the_promise() -> None:
    made = plan("tiny-lora", "--strategies", "single,ddp", "--steps", "7", "--lora_dropout", "0.1", "--mixed_precision",
                "bf16", "--learning_rate", "1e-4")  # fmt: skip
    for job in [made.reference, *(row.job for row in made.rows)]:
        assert job is not None
        config = job.config
        assert (config.mixed_precision, config.lora_dropout, config.deterministic) == ("no", 0.0, True)
        assert (config.max_steps, config.logging_steps, config.save_steps) == (7, 1, 0)
        assert config.eval_dataset_name is None
        assert (config.learning_rate, config.preset) == (1e-4, "tiny-lora")
        assert job.run.path.parent == made.folder
        assert config.runs_dir == str(made.folder)
        assert config.outside_parity() == []
    assert [(row.strategy, row.world_size) for row in made.rows] == [("single", 1), ("ddp", 2)]
    assert made.overrides == [
        {"option": "mixed_precision", "given": "bf16", "used": "no"},
        {"option": "lora_dropout", "given": "0.1", "used": "0.0"},
    ]
    assert not made.folder.exists()


def test_a_config_file_is_a_choice_and_a_preset_is_none(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("preset: tiny-lora\neval_steps: 5\nsave_steps: 3\n")
    assert [line["option"] for line in plan("--config", "my.yaml", "--strategies", "ddp").overrides] == [
        "save_steps",
        "eval_steps",
    ]
    assert plan("tiny-lora", "--strategies", "ddp").overrides == []


def test_a_preset_that_leaves_the_promise_is_told() -> None:
    given = build({"model_name_or_path": "x", "dataset_name": "y", "mixed_precision": "bf16", "save_steps": 7})
    used = given.model_copy(update={"mixed_precision": "no", "save_steps": 0})
    asked = _Asked(["its-name"], {}, Request(), {}, {})
    assert [line["option"] for line in _overrides(asked, given, used, _known(SETTINGS), {})] == ["mixed_precision"]


def test_without_a_model_the_one_that_ships_is_proved() -> None:
    assert plan().reference.config.preset == "tiny-full"
    assert plan("--dataset_name", "x.jsonl", "--eval_dataset_name", "none").reference.config.preset == "tiny-full"


def test_only_the_rows_get_the_control() -> None:
    made = plan("--strategies", "single,ddp", "--control", "mean-of-means", "--global_batch_size", "8")
    assert made.reference.config.control == "none"
    assert [row.job.config.control for row in made.rows if row.job] == ["mean-of-means"] * 2
    assert made.reference.config.per_device_train_batch_size == 4, "two micro-batches at least"


def test_layers_cut_every_run() -> None:
    made = plan("--strategies", "ddp", "--layers", "2")
    assert [job.config.num_hidden_layers for job in (made.reference, made.rows[0].job) if job] == [2, 2]


@pytest.mark.parametrize(
    ("total", "asked", "sizes", "several", "micro"),
    [
        (16, 8, {"single": 1, "ddp": 2}, False, 8),
        (16, 8, {"ddp": 2, "hsdp": 4}, False, 4),
        (12, 8, {"ddp": 2, "hsdp": 4}, False, 3),
        (12, 8, {"ddp": 3, "hsdp": 4}, False, 1),
        (16, 16, {"single": 1}, False, 16),
        (16, 16, {"single": 1}, True, 8),
        (7, 7, {}, True, 1),
    ],
)
def test_one_micro_batch_suits_all_rows(
    total: int, asked: int, sizes: dict[str, int], several: bool, micro: int
) -> None:
    assert micro_batch(total, asked, sizes, several) == micro
    assert all(total % (micro * size) == 0 for size in sizes.values())


def test_no_batch_suits_and_the_arithmetic_is_told() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size=6 .*hsdp 4; together 4.*use --global_batch_size 8"):
        micro_batch(6, 2, {"ddp": 2, "hsdp": 4}, False)
    assert run_verb(["prove", "--strategies", "ddp", "--global_batch_size", "3"]) == 2


def test_a_smaller_micro_batch_is_announced() -> None:
    (line,) = plan("tiny-full", "--strategies", "ddp", "--num_processes", "4").overrides
    assert (line["option"], line["given"], line["used"]) == ("per_device_train_batch_size", "8", "4")
    assert line["why"] == "16 rows on 1 and 4 ranks in micro-batches of one size"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("tiny-lroa", "did you mean tiny-lora?"),
        ("--steps 0", "steps='0'"),
        ("--steps many", "steps='many'"),
        ("--layers x", "layers='x'"),
        ("--layers 0", "e.g. --layers 2"),
        ("--bogus 1", "`tunesmith prove --help` lists"),
        ("--layer 2", "did you mean layers?"),
        ("--step 2", "did you mean steps?"),
        ("--strategies all,ddp", "`all` stands alone"),
        ("--config steps.yaml", "write --steps on the command line of `tunesmith prove`"),
        ("--output_dir used/thesis.txt/x", "output_dir={}/used/thesis.txt/x cannot be made"),
        ("--output_dir used/thesis.txt/x", "choose another output_dir"),
        ("--runs_dir used/thesis.txt", "runs_dir={}/used/thesis.txt cannot be made"),
        ("--control upside-down", "control='upside-down'"),
        ("--strategies ddp,dpp", "did you mean ddp?"),
        ("--strategies ddp,ddp", "two runs would be named ddp"),
        ("--strategy ddp", "write --strategies a,b,c"),
        ("--resume_from_checkpoint auto --output_dir x", "leave it out"),
        ("--check", "no --check"),
        ("--learning_rte 1", "did you mean learning_rate?"),
        ("--gpus x", "no GPU id"),
        ("--gpus 0", "no GPU is visible"),
        ("--num_processes 0", "out of range"),
        ("--output_dir used", "holds other files"),
        ("--runs_dir " + "x" * 300, "runs_dir=xxx"),
        ("--runs_dir used/thesis.txt", "not writable"),
        ("--layers 2 --num_hidden_layers 2", "keep one"),
        ("--control mean-of-means --global_batch_size 1 --strategies single", "two micro-batches"),
        ("--model_name_or_path embedded", "dataset_name is missing"),
    ],
)
def test_a_slip_gets_a_line_and_leaves_nothing(words: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("used").mkdir()
    Path("used/thesis.txt").write_text("all of it")
    Path("steps.yaml").write_text("preset: tiny-full\nsteps: 3\n")
    part = part.replace("{}", str(Path.cwd()))
    assert run_verb(["prove", *words.split(), "--json"]) == 2
    mistakes = json.loads(capsys.readouterr().out)["mistakes"]
    assert len([line for line in mistakes if part in line]) == 1, mistakes
    assert not Path("runs").exists()


def test_all_mistakes_come_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = "tiny-lroa --learning_rte 1 --steps x --strategies dpp --gpus y --control z"
    assert run_verb(["prove", *words.split(), "--json"]) == 2
    assert len(json.loads(capsys.readouterr().out)["mistakes"]) == 6


# -- a strategy of the user's own ------------------------------------------------------------------------------------


def own_yaml(name: str, text: str = "", processes: int = 2) -> str:
    Path(name).write_text(f"distributed_type: MULTI_GPU\nnum_processes: {processes}\n{text}")
    return name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_precision_of_a_file_is_replaced_and_told(precision: str) -> None:
    made = plan("--strategies", f"ddp,{own_yaml('my.yaml', f'mixed_precision: {precision}')}")
    job = made.rows[1].job
    assert job is not None, made.rows[1].reason
    assert (job.strategy.name, job.strategy.values["mixed_precision"], job.config.mixed_precision) == ("my", "no", "no")
    assert made.overrides == [
        {"option": "mixed_precision", "given": precision, "used": "no", "why": "written in my.yaml"}
    ]


def test_a_file_that_says_no_precision_is_taken_as_it_is() -> None:
    made = plan("--strategies", own_yaml("my.yaml", "mixed_precision: 'no'"))
    assert (made.overrides, made.rows[0].reason) == ([], None)


@pytest.mark.parametrize("text", ["mixed_precision: fp9", "fsdp_config: {fsdp_version: 2}", "nonsense: 1"])
def test_another_slip_in_a_file_is_a_wrong_request(text: str) -> None:
    assert run_verb(["prove", "--strategies", own_yaml("my.yaml", text)]) == 2
    assert not Path("runs").exists()


def test_a_file_that_cannot_have_the_processes_is_a_wrong_request(capsys: pytest.CaptureFixture[str]) -> None:
    shipped = load_strategy("hsdp").values
    Path("my.yaml").write_text(yaml.safe_dump(shipped))
    assert plan("--strategies", "hsdp", "--num_processes", "5").rows[0].job is None
    assert run_verb(["prove", "--strategies", "my.yaml", "--num_processes", "5"]) == 2
    assert "num_processes=5" in capsys.readouterr().err


def test_the_warnings_of_a_row_are_said_and_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("app.prove.launch", Launcher())
    monkeypatch.setattr("app.prove.preflight", lambda job, quiet: None)
    monkeypatch.setattr(Strategy, "outside_parity", lambda self: ["x=bf16"] if self.name == "ddp" else [])
    assert run_verb(["prove", "--strategies", "single,ddp", "--steps", "3", "--quiet", "--json"]) == 0
    shown = capsys.readouterr()
    line = "outside the promise that the strategy never changes the model: x=bf16"
    document = json.loads(shown.out)
    assert shown.err.splitlines() == [f"warning: ddp: {line}"]
    assert [row["warnings"] for row in document["rows"]] == [[], [line]]
    assert f"- warning: ddp: {line}" in (Path(document["report_dir"]) / "report.md").read_text()


# -- what cannot run here --------------------------------------------------------------------------------------------


def strategy(kind: str, **section: Any) -> Strategy:
    name = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}.get(kind, "")
    return Strategy("x", "", {"distributed_type": kind, "num_processes": 2, **({name: section} if name else {})})


def test_too_few_gpus_are_a_row_that_was_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.hardware.find_gpus", lambda: [Gpu(0, "GPU-a", "H100", 2**30)])
    made = plan("--strategies", "single,ddp")
    assert made.reference.devices.gpu_ids == [0]
    assert made.rows[0].job is not None
    assert made.rows[1].job is None
    assert "needs 2 GPUs and has 1" in str(made.rows[1].reason)


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

    def __call__(self, job: Job, display: object, outer: object = None) -> dict[str, Any]:
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
        return run.write_state(state=state, cause=cause, export_dir=str(run.model))


@pytest.fixture
def prove(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Runs the verb with a stand-in for the launcher; gives status and document."""

    def call(launcher: Launcher, *words: str, strategies: str = "single,ddp") -> tuple[int, Any]:
        monkeypatch.setattr("app.prove.launch", launcher)
        monkeypatch.setattr("app.prove.preflight", getattr(launcher, "preflight", lambda job, quiet: None))
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
    assert "2 of 3 steps have" in document["rows"][0]["reason"]


def test_without_a_reference_nothing_is_judged(prove: Prove) -> None:
    launcher = Launcher(ends={"reference": ("failed", "out of memory")})
    status, document = prove(launcher)
    assert (status, launcher.trained) == (1, ["reference"])
    assert [row["passed"] for row in document["rows"]] == [None, None]
    assert document["rows"][0]["reason"] == "not run: the reference failed: out of memory"


def test_what_the_check_refuses_cannot_run(prove: Prove) -> None:
    class Checking(Launcher):
        def preflight(self, job: Job, quiet: bool) -> None:
            if job.run.id == "ddp":
                raise ConfigError("method=odd is refused under ddp; use single")

    status, document = prove(Checking())
    assert status == 0
    assert (document["rows"][1]["passed"], document["rows"][1]["reason"][:10]) == (None, "method=odd")


def test_a_check_that_crashes_is_a_failure(prove: Prove) -> None:
    class Crashing(Launcher):
        def preflight(self, job: Job, quiet: bool) -> None:
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
    assert reason.startswith("interrupted: stopped by SIGINT at step 2 of 3; prove keeps no checkpoint")
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


def test_people_get_a_table_and_what_was_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("app.prove.launch", Launcher({"ddp": changed(s2=(1.5 + 4e-6, 0.5))}))
    monkeypatch.setattr("app.prove.preflight", lambda job, quiet: None)
    assert run_verb(["prove", "tiny-lora", "--strategies", "single,ddp", "--steps", "3", "--tf32", "true"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].split("  ")[0] == "strategy"
    assert lines[2].split() == ["ddp", "2", "4e-06", "0", "2", "pass"]
    assert "2 of 2 rows train as one process does" in shown.out
    assert "are deleted" in shown.out
    assert "prove sets tf32=false in place of true" in shown.err
    assert "[3/3] ddp on 2 CPU processes" in shown.err


def test_a_terminal_gets_the_table_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("app.prove.launch", Launcher())
    monkeypatch.setattr("app.prove.preflight", lambda job, quiet: None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run_verb(["prove", "--strategies", "ddp", "--steps", "3", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert "loss diff" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize("width", [50, 80])
def test_a_narrow_terminal_shows_whole_names_and_reasons_below(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("app.prove.launch", Launcher())
    monkeypatch.setattr("app.prove.preflight", lambda job, quiet: None)
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
