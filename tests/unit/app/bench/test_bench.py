"""`tunesmith bench`: what it tries and refuses, when it advises and when it must not, and what it leaves behind."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from app.bench.plan import (
    BATCH,
    BENCH,
    KERNELS_OF_CPUS,
    KERNELS_OF_GPUS,
    LEAST_STEPS,
    MOST_STEPS,
    SETTINGS,
    WARM,
    Measured,
    Plan,
    Trial,
    changes_of,
    make_plan,
)  # fmt: skip
from app.bench.report import advice, conclusion, helpful
from app.bench.runner import Watch, enough_steps
from app.cli import run_verb
from app.hardware import Gpu
from app.launch.foreground import CheckBroke
from app.launch.job import TrainJob
from app.launch.supervisor import STOP_NOTES, Listener
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.run.folder import RunFolder, register, registered_runs

pytestmark = pytest.mark.usefixtures("elsewhere")

ROOT = Path(__file__).resolve().parents[4]


# -- the plan --------------------------------------------------------------------------------------------------------


def plan(*words: str) -> Plan:
    return make_plan(BENCH.read(words))


def config(**values: Any) -> TrainConfig:
    return build({"model_name_or_path": "x", "dataset_name": "y", **values})


def test_one_setting_changes_at_a_time() -> None:
    found = changes_of(config(per_device_train_batch_size=4), SETTINGS, on_gpus=True)
    assert [change for change in found if "attn_implementation" not in change] == [
        {BATCH: 8}, {BATCH: 2}, {"packing": False}, {"gradient_checkpointing": True}, {"torch_compile": True},
    ]  # fmt: skip
    assert {"attn_implementation": "varlen"} in found
    assert {"attn_implementation": "auto"} not in found, "it is the user's own"


def test_what_makes_no_sense_is_not_tried() -> None:
    assert changes_of(config(), [BATCH], on_gpus=False) == [{BATCH: 2}], "half a row is none"
    assert changes_of(config(), ["torch_compile"], on_gpus=False) == []
    assert changes_of(config(torch_compile=True), ["torch_compile"], on_gpus=False) == [{"torch_compile": False}]


@pytest.mark.parametrize(("on_gpus", "kernels"), [(False, KERNELS_OF_CPUS), (True, KERNELS_OF_GPUS)])
def test_other_kernels_are_tried(on_gpus: bool, kernels: tuple[str, ...]) -> None:
    found = changes_of(config(attn_implementation="sdpa"), ["attn_implementation"], on_gpus)
    assert found == [{"attn_implementation": name} for name in kernels if name != "sdpa"]
    for name in kernels:
        assert config(attn_implementation=name, mixed_precision="bf16").attn_implementation == name


def test_selective_checkpointing_is_tried_where_there_is_checkpointing() -> None:
    assert changes_of(config(), ["selective_checkpointing"], on_gpus=False) == []
    checkpointing = config(gradient_checkpointing=True)
    assert changes_of(checkpointing, ["selective_checkpointing"], on_gpus=False) == [{"selective_checkpointing": True}]


def test_every_run_is_the_users_but_for_its_change() -> None:
    made = plan("tiny-lora", "--learning_rate", "1e-4", "--strategy", "single", "--eval_dataset_name", "none",
                "--eval_share", "0.1", "--eval_steps", "5", "--save_steps", "7", "--output_dir", "mine")  # fmt: skip
    given = made.job.config
    assert made.base.changes == {}
    for one in [made.base, *made.variants]:
        assert one.config is not None
        changed = {name for name in TrainConfig.model_fields if getattr(one.config, name) != getattr(given, name)}
        assert changed <= {*one.changes, "logging_steps", "save_steps", "eval_steps", "max_restarts", "max_steps",
                           "output_dir"}  # fmt: skip
        assert one.config.eval_share == 0.1, "the rows that are trained on stay the same"
        assert (one.config.logging_steps, one.config.save_steps, one.config.eval_steps) == (1, 0, 0)
        assert one.config.max_steps is not None
        assert one.config.max_steps > WARM + MOST_STEPS
    assert (made.steps, made.turns, made.job.strategy.name) == (None, 2, "single")


def test_gpus_are_worth_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.hardware.find_gpus", lambda: [Gpu(0, "GPU-a", "H100", 2**30)])
    assert {"torch_compile": True} in [one.changes for one in plan("tiny-lora").variants]
    monkeypatch.setattr("app.hardware.find_gpus", lambda: [])
    assert {"torch_compile": True} not in [one.changes for one in plan("tiny-lora").variants]


def test_a_batch_that_does_not_divide_is_not_possible() -> None:
    double, half = plan("tiny-full", "--num_processes", "2", "--settings", BATCH).variants
    assert (double.outcome, double.able) == ("not possible", False)
    assert "global_batch_size=16 is not divisible by per_device_train_batch_size=16 x 2" in str(double.reason)
    assert (half.outcome, half.able) == ("not run", True)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("", ["model_name_or_path is missing", "dataset_name is missing"]),
        (
            "tiny-lroa",
            ["tiny has no method 'lroa'; there are full, lora, dpo, kto, distill, reward, grpo and pretrain"],
        ),
        ("tiny-lora --seed", ["--seed"]),
        ("tiny-lora --learning_rte 1", ["did you mean learning_rate?"]),
        ("tiny-lora --turn 3 --nonsense 1", ["did you mean turns?", "`tunesmith bench --help` lists"]),
        ("tiny-lora --num_processes 3", ["is not divisible"]),
        ("tiny-lora --strategy dddp --gpus x", ["did you mean ddp?", "is not a GPU id"]),
        ("tiny-lora --steps 0 --turns 1", ["steps='0'", "turns='1' is not a valid number of turns; use 2 to 20"]),
        ("tiny-lora --steps", ["--steps has no value"]),
        ("tiny-lora --steps ²", ["steps='²'"]),
        ("tiny-lora --settings packing,speed", ["speed cannot be varied; use per_device"]),
        ("tiny-lora --settings ,", ["settings: no setting is given"]),
        ("tiny-lora --settings torch_compile --num_processes 1", ["only on GPUs"]),
        ("tiny-lora --check --detach", ["--check is for", "--detach is for"]),
        ("tiny-lora --force", ["--force is for"]),
        ("tiny-lora --num_machines 2 --steps x", ["steps='x'", "this machine only"]),
        ("tiny-lora --output_dir x --resume_from_checkpoint auto", ["starts each run at its first step"]),
    ],
)
def test_a_wrong_request_is_refused(words: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["bench", *words.split(), "--json"]) == 2
    shown = capsys.readouterr()
    mistakes = json.loads(shown.out)["mistakes"]
    assert len(mistakes) == len(parts), mistakes
    assert all(any(part in line for line in mistakes) for part in parts), mistakes
    assert list(Path().iterdir()) == []


# -- the clock -------------------------------------------------------------------------------------------------------


def ends(steps: int, seconds: float) -> dict[int, float]:
    return {step: step * seconds for step in range(1, steps + 1)}


@pytest.mark.parametrize(
    ("steps", "seconds", "fixed", "counted"),
    [
        (0, 1.0, None, 0),
        (WARM + MOST_STEPS - 1, 0.1, None, 0),
        (WARM + MOST_STEPS, 0.1, None, MOST_STEPS),
        (WARM + MOST_STEPS + 9, 0.1, None, MOST_STEPS),
        (WARM + LEAST_STEPS - 1, 60.0, None, 0),
        (WARM + LEAST_STEPS, 60.0, None, LEAST_STEPS),
        (WARM + 5, 4.0, None, 5),
        (WARM + 4, 4.0, None, 0),
        (WARM + 5, 60.0, 6, 0),
        (WARM + 7, 60.0, 6, 6),
    ],
)
def test_slow_steps_are_fewer(steps: int, seconds: float, fixed: int | None, counted: int) -> None:
    assert enough_steps(ends(steps, seconds), fixed) == counted


def test_a_watched_run_is_stopped_without_saving(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder(tmp_path / "run")
    run.create()
    watch = Watch(run, 2)
    watch("tick", "")
    write_rows(run, WARM + 1, 0.1)
    watch("tick", "")
    assert (watch.steps, run.stop_asked()) == (0, None)
    write_rows(run, WARM + 2, 0.1)
    watch("tick", "")
    assert (watch.steps, run.stop_asked(), watch.interrupted) == (2, False, False)
    watch("note", "queued: b has GPU 0")
    run.ask_stop()
    watch("note", STOP_NOTES[0])
    assert (watch.interrupted, run.stop_asked()) == (True, False)
    assert capsys.readouterr().err.splitlines() == ["queued: b has GPU 0", "stopping: nothing is saved"]


# -- the advice ------------------------------------------------------------------------------------------------------


def made(*rates: float, memory: float = 2.0, loss: float | None = 1.5, outcome: str = "measured",
         **changes: Any) -> Trial:  # fmt: skip
    runs = [Measured(rate, 100 / rate, memory, loss, 0.5) for rate in rates]
    return Trial(changes, config(), outcome, None, runs)


BASE = made(100, 104)


def texts(base: Trial, *variants: Trial, combined: Trial | None = None) -> list[str]:
    return [line["text"] for line in advice(base, variants, combined)]


def test_a_gain_above_the_noise_is_advised() -> None:
    double = made(132, 135.24, memory=3.0, per_device_train_batch_size=8)
    assert texts(BASE, double) == [
        "use --per_device_train_batch_size 8: 1.31x tokens/s, memory 2.00 -> 3.00 GiB"
    ]  # fmt: skip
    (line,) = advice(BASE, [double], None)
    assert (line["options"], line["for"], line["memory_gib"]) == ({BATCH: 8}, "speed", 3.0)
    assert line["ratio"] == pytest.approx(1.31)


@pytest.mark.parametrize(
    ("base", "variant"),
    [
        (BASE, made(105, 105, per_device_train_batch_size=8)),  # 2.9 %, and the base's runs are 3.9 % apart
        (made(100, 100), made(102, 102, packing=True)),  # below what is worth a change, on a silent machine
        (made(80, 120), made(130, 130, packing=True)),  # 30 %, and the base's runs are 40 % apart
        (made(100, 100), made(100, 160, packing=True)),  # 30 %, and its own runs are 46 % apart
        (made(100), made(200, 200, packing=True)),  # a base without a repeat has no noise to compare with
        (made(100, 100), made(200, packing=True)),
        (BASE, made(90, 90, per_device_train_batch_size=8)),
        (BASE, made(200, 200, loss=1.6, attn_implementation="eager")),  # faster, and trains something else
        (BASE, made(200, 200, loss=None, attn_implementation="eager")),
        (BASE, made(200, 200, outcome="failed", attn_implementation="eager")),
    ],
)
def test_what_is_no_gain_is_not_advised(base: Trial, variant: Trial) -> None:
    """Controls."""
    assert texts(base, variant) == []
    assert helpful(base, [variant]) == []


def test_packing_may_change_the_loss_and_that_is_told() -> None:
    packed = made(200, 200, loss=2.5, packing=True)
    packed.runs = [Measured(200, 2.0, 2.0, 2.5, 2.0)] * 2
    (line,) = texts(BASE, packed)
    assert line.startswith("use --packing true: 1.96x tokens/s")
    assert line.endswith("it changes the rows of a step: 400 tokens instead of 100")


def test_of_one_option_the_fastest_value_counts() -> None:
    slow, fast = made(130, 130, attn_implementation="a"), made(150, 150, attn_implementation="b")
    double = made(140, 140, per_device_train_batch_size=8)
    assert helpful(BASE, [slow, fast, double]) == [fast, double]


def test_the_largest_measured_gain_comes_first() -> None:
    double, kernel = made(130, 130, per_device_train_batch_size=8), made(140, 140, attn_implementation="b")
    both = {BATCH: 8, "attn_implementation": "b"}
    found = texts(BASE, double, kernel, combined=made(160, 160, **both))
    assert [line.partition(":")[0] for line in found] == [
        "use --per_device_train_batch_size 8 --attn_implementation b",
        "or --attn_implementation b",
        "or --per_device_train_batch_size 8",
    ]
    less = texts(BASE, double, kernel, combined=made(135, 135, **both))
    assert less[0].startswith("use --attn_implementation b: 1.37x"), "gains are measured together, never multiplied"
    broken = made(outcome="out of memory", **both)
    assert len(texts(BASE, double, kernel, combined=broken)) == 2


def test_what_saves_memory_is_told_apart() -> None:
    saving = made(80, 80, memory=1.0, gradient_checkpointing=True)
    (line,) = advice(BASE, [saving, made(80, 80, memory=1.5, per_device_train_batch_size=2)], None)
    assert line["text"] == "if memory is short, --gradient_checkpointing true: 0.78x tokens/s, memory 2.00 -> 1.00 GiB"
    assert line["for"] == "memory"
    assert texts(BASE, made(80, 80, memory=1.9, gradient_checkpointing=True)) == []
    assert texts(BASE, made(80, 80, memory=1.0, packing=False)) == [], "it would train other steps"


def test_settings_that_do_not_fit_get_one_that_does() -> None:
    base = made(outcome="out of memory")
    half, saving = made(80, 80, per_device_train_batch_size=2), made(90, 90, gradient_checkpointing=True)
    (line,) = advice(base, [half, saving, made(outcome="out of memory", packing=True)], None)
    assert line["text"] == "use --gradient_checkpointing true to make it fit: 90 tokens/s, memory 2.00 GiB"
    assert (line["for"], line["ratio"]) == ("fit", None)


# -- the verb --------------------------------------------------------------------------------------------------------


def write_rows(run: RunFolder, steps: int, seconds: float, loss: float = 1.5, memory: float = 2.0) -> None:
    """Rows of steps of 100 real tokens; the first two are slow, as nothing is warm yet."""
    rows = [{"step": step, "loss": loss / step, "memory_gib": memory, "tokens": 100 * step,
             "elapsed_s": seconds * step + 10 * min(step, 2)} for step in range(1, steps + 1)]  # fmt: skip
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Launcher:
    """Stands in for the launch.

    Args:
        seconds: of a step, by a part of the changes' text, such as `packing`; others take one second.
        falls: cause by such a part; `memory` in it leaves the note of a rank whose memory ran out.
    """

    def __init__(self, seconds: dict[str, float] | None = None, falls: dict[str, str] | None = None):
        self.seconds, self.falls = seconds or {}, falls or {}
        self.ran: list[str] = []
        self.folders: list[Path] = []
        self.interrupt_at = 0
        self.refused: dict[str, Exception] = {}

    def name(self, job: TrainJob) -> str:
        given, names = self.given, [name for name in SETTINGS if getattr(job.config, name) != getattr(self.given, name)]
        assert given.model_name_or_path == job.config.model_name_or_path
        return "+".join(f"{name}={getattr(job.config, name)}" for name in names) or "yours"

    def preflight(self, job: TrainJob, quiet: bool) -> None:
        if not hasattr(self, "given"):
            self.given = job.config
        for part, error in self.refused.items():
            if part in self.name(job):
                raise error

    def __call__(
        self, job: TrainJob, display: AbstractContextManager[Listener], outer: Mapping[str, str], bound: bool = False
    ) -> dict[str, Any]:
        name, run = self.name(job), job.run
        self.ran.append(name)
        self.folders.append(run.path)
        assert outer["TMPDIR"] == str(run.path.parent)
        run.create()
        register(run)
        fall = next((cause for part, cause in self.falls.items() if part in name), None)
        with display as listener:
            if len(self.ran) == self.interrupt_at:
                run.ask_stop()
                listener("note", STOP_NOTES[0])
                return run.write_state(state="stopped", cause="stopped without saving at step 1")
            if fall:
                if "memory" in fall:
                    run.note_out_of_memory(0)
                return run.write_state(state="failed", cause=fall)
            write_rows(run, WARM + 30, math.prod(value for part, value in self.seconds.items() if part in name))
            listener("tick", "")
        assert run.stop_asked() is False, "nothing may be saved"
        return run.write_state(state="stopped", cause="stopped without saving")


Bench = Callable[..., tuple[int, Any]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs the verb with a stand-in for the launcher; gives status and document."""

    def call(launcher: Launcher, *words: str) -> tuple[int, Any]:
        monkeypatch.setattr("app.bench.runner.launch", launcher)
        monkeypatch.setattr("app.bench.bench.preflight", launcher.preflight)
        monkeypatch.setattr("app.bench.runner.preflight", launcher.preflight)
        status = run_verb(["bench", "tiny-full", "--num_processes", "2", *words, "--json"])
        assert not Path("runs").exists()
        assert registered_runs() == []
        assert not any(folder.parent.exists() for folder in launcher.folders)
        return status, json.loads(capsys.readouterr().out)

    return call


def test_the_runs_take_turns(bench: Bench) -> None:
    launcher = Launcher()
    status, document = bench(launcher, "--settings", "packing,gradient_checkpointing,per_device_train_batch_size")
    assert status == 0
    turn = ["yours", "packing=False", "gradient_checkpointing=True", f"{BATCH}=4"]
    assert launcher.ran == [*turn, *reversed(turn)]
    base = document["base"]
    assert (base["outcome"], base["repeats"], base["ratio"]) == ("measured", [100.0, 100.0], 1.0)
    assert (base["seconds_per_step"], base["memory_gib"], base["first_loss"]) == (1.0, 2.0, 1.5)
    assert base["loss"] == 1.5 / (WARM + MOST_STEPS)
    assert [row["outcome"] for row in document["variants"]] == ["measured", "measured", "not possible", "measured"]
    assert (document["advice"], document["noise"], document["steps"]) == ([], 0.0, 20)
    assert (document["strategy"], document["world_size"], document["interrupted"]) == ("ddp", 2, False)
    assert "already good: no change reliably gains more than 3.0%" in conclusion(document)[-1]


def test_what_helps_is_measured_together(bench: Bench) -> None:
    launcher = Launcher({"packing": 0.5, "eager": 0.8, "checkpointing": 1.3})
    status, document = bench(launcher, "--settings", "packing,attn_implementation,gradient_checkpointing")
    assert status == 0
    both = "packing=False+attn_implementation=eager"
    assert launcher.ran[-4:] == ["yours", both, both, "yours"]
    assert len(document["base"]["repeats"]) == 4
    assert document["variants"][-1]["changes"] == {"packing": False, "attn_implementation": "eager"}
    assert [line["ratio"] for line in document["advice"]] == pytest.approx([2.5, 2.0, 1.25])


def test_one_that_helps_is_not_measured_again(bench: Bench) -> None:
    launcher = Launcher({"packing": 0.5})
    _, document = bench(launcher, "--settings", "packing,gradient_checkpointing", "--turns", "3", "--steps", "5")
    assert len(launcher.ran) == 9
    assert (document["turns"], document["steps"]) == (3, 5)
    assert len(document["advice"]) == 1


def test_a_variant_that_falls_is_told_and_the_bench_goes_on(bench: Bench) -> None:
    launcher = Launcher(falls={"packing": "OutOfMemoryError: CUDA out of memory", "eager": "ValueError: \x1b[31mno"})
    status, document = bench(launcher, "--settings", "packing,attn_implementation,gradient_checkpointing")
    assert status == 0
    found = {row["setting"]: row for row in document["variants"]}
    assert found["packing=false"]["outcome"] == "out of memory"
    assert (found["attn_implementation=eager"]["outcome"], found["attn_implementation=eager"]["reason"]) == (
        "failed", "ValueError: no",
    )  # fmt: skip
    assert found["gradient_checkpointing=true"]["outcome"] == "measured"
    assert launcher.ran.count("packing=False") == 1, "it would only fall again"


def test_settings_that_do_not_fit_are_no_end(bench: Bench) -> None:
    status, document = bench(Launcher(falls={"yours": "out of memory"}), "--settings", "gradient_checkpointing")
    assert (status, document["base"]["outcome"]) == (1, "out of memory")
    assert document["advice"][0]["for"] == "fit"
    assert "could not be measured: out of memory" in conclusion(document)[0]


def test_settings_that_fail_end_it(bench: Bench) -> None:
    launcher = Launcher(falls={"yours": "ValueError: bad model"})
    status, document = bench(launcher)
    assert (status, launcher.ran, document["advice"]) == (1, ["yours"], [])
    assert document["base"]["reason"] == "ValueError: bad model"
    assert {row["outcome"] for row in document["variants"]} == {"not run", "not possible"}


def test_what_the_check_refuses_is_not_possible(bench: Bench) -> None:
    launcher = Launcher()
    launcher.refused = {"packing": ConfigError("5 rows are too few"), "eager": CheckBroke("it broke off", "")}
    status, document = bench(launcher, "--settings", "packing,attn_implementation,gradient_checkpointing")
    assert status == 0
    assert [(row["outcome"], row["reason"]) for row in document["variants"] if row["reason"]] == [
        ("not possible", "5 rows are too few"), ("failed", "it broke off"),
    ]  # fmt: skip
    assert set(launcher.ran) >= {"yours", "gradient_checkpointing=True"}
    assert "packing=False" not in launcher.ran


def test_what_train_refuses_is_refused(bench: Bench) -> None:
    launcher = Launcher()
    launcher.refused = {"yours": ConfigError("the data has no rows")}
    assert bench(launcher) == (2, {"mistakes": ["the data has no rows"]})
    assert launcher.ran == []


@pytest.mark.parametrize("at", [1, 3])
def test_an_interruption_reports_what_was_measured(at: int, bench: Bench) -> None:
    launcher = Launcher({"packing": 0.2})
    launcher.interrupt_at = at
    status, document = bench(launcher, "--settings", "packing")
    assert (status, document["interrupted"], len(launcher.ran)) == (130, True, at)
    assert [len(document["base"]["repeats"]), len(document["variants"][0]["repeats"])] == [at // 3, at // 3]
    assert (document["advice"], document["noise"]) == ([], None), "without a repeat nothing is known of the noise"


def test_the_table_is_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    launcher = Launcher({"packing": 0.5}, {"eager": "ValueError: \x1b[31mno such kernel"})
    monkeypatch.setattr("app.bench.runner.launch", launcher)
    monkeypatch.setattr("app.bench.bench.preflight", launcher.preflight)
    monkeypatch.setattr("app.bench.runner.preflight", launcher.preflight)
    words = ["--settings", "packing,attn_implementation,gradient_checkpointing", "--strategy", "single"]
    assert run_verb(["bench", "tiny-full", *words]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].startswith("yours: per_device_train_batch_size=8, packing=true")
    header = "setting tokens/s vs yours spread s/step memory GiB loss, first to last"
    assert " ".join(lines[2].split()) == header
    assert " ".join(lines[4].split()) == "packing=false 200 2.00x 0.0% 0.500 2.00 1.5000 to 0.0652"
    assert "attn_implementation=eager: failed: ValueError: no such kernel" in lines
    assert "the noise is 0.0%, the spread of 2 runs of your settings" in shown.out
    assert "use --packing false: 2.00x tokens/s, memory 2.00 -> 2.00 GiB; it changes" in shown.out
    assert "[1/" in shown.err
    assert "yours: 100 tokens/s, 1.000 s per step" in shown.err


@pytest.mark.parametrize("width", ["60", "120"])
def test_the_help_has_its_options_and_those_of_train(
    width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert run_verb(["bench", "-h"]) == 0
    words = set(capsys.readouterr().out.split())
    assert {"--settings", "--steps", "--turns", "--strategy", "--gpus", "--json", "--learning_rate"} <= words
    assert not {"--max_steps", "--num_machines", "--save_steps", "--detach"} & words


def test_bench_imports_no_torch() -> None:
    code = "import sys, app.bench.bench; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
