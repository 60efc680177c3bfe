"""The `tunesmith` command as a user meets it: speed, exit status, and the answer to every slip."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.cli import run_verb
from trainers.config.options import TrainConfig
from trainers.config.parse import whole_number
from trainers.run.folder import RunFolder

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "transformers", "accelerate", "datasets", "peft", "numpy", "pydantic", "yaml", "psutil")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)


class Shell:
    """Runs verbs in this process and keeps what they printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self.capsys = capsys
        self.out, self.errors = "", [""]

    def __call__(self, *arguments: str) -> int:
        status = run_verb(arguments)
        shown = self.capsys.readouterr()
        self.out, self.errors = shown.out, shown.err.splitlines()
        return status


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def python(code: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)


def imported(arguments: list[str], modules: tuple[str, ...]) -> str:
    """Which of the modules a fresh process has after a verb."""
    code = f"import sys; from app.cli import run_verb; run_verb({arguments}); "
    return python(code + f"print([name for name in {modules} if name in sys.modules])").stdout.splitlines()[-1]


def test_help_answers_at_once() -> None:
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        python("from app.cli import run_verb; run_verb(['--help'])")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert sorted(times)[2] < 0.4


def test_the_version_is_the_packages(shell: Shell) -> None:
    assert shell("--version") == 0
    assert shell.out.strip() == f"tunesmith {metadata.version('tunesmith')}"


def test_help_imports_nothing_heavy() -> None:
    assert imported(["--help"], HEAVY) == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--help"],
        ["runs", "list"],
        ["train", "x"],
        ["presets"],
        ["strategies"],
        ["stop", "x"],
        ["record", "x"],
        ["demo", "x"],
        ["bench", "tiny-full", "--steps=x"],
    ],
)
def test_no_verb_imports_torch(arguments: list[str]) -> None:
    assert imported(arguments, HEAVY[:6]) == "[]"


@pytest.mark.parametrize("words", [[], ["runs"]])
def test_without_a_verb_the_verbs_are_shown(words: list[str], shell: Shell) -> None:
    assert shell(*words) == 0
    assert "List" in shell.out
    assert shell.errors == []


def test_the_help_of_train_has_every_option(shell: Shell) -> None:
    assert shell("train", "--help") == 0
    words = shell.out.split()
    assert [name for name in TrainConfig.model_fields if name != "preset" and f"--{name}" not in words] == []
    texts = ("--strategy", "--gpus", "<full|lora|qlora>", "Optimizer", "default: 0.0002", "at least 8", "<true|false>")
    for part in texts:
        assert part in shell.out


def test_the_help_of_resume_says_what_it_takes(shell: Shell) -> None:
    assert shell("resume", "--help") == 0
    assert "RUN" in shell.out


def test_all_mistakes_of_a_request_come_at_once(shell: Shell) -> None:
    words = "train tiny-lroa --learning_rte 1e-4 --seed -1 --strategy dddp --gpus 0,x --num_processes two"
    assert shell(*words.split()) == 2
    assert shell.out == ""
    expected = [
        "preset=tiny-lroa is unknown: tiny has no method 'lroa'; there are full, lora, dpo, kto, distill,",
        "learning_rte is not an option; did you mean learning_rate?",
        "seed='-1' is refused",
        "strategy='dddp' is unknown; did you mean ddp?",
        "gpus='0,x': 'x' is not a GPU id",
        "num_processes='two' is not a whole number",
    ]
    assert len(shell.errors) == len(expected)
    assert all(any(part in line for line in shell.errors) for part in expected)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("train", "model_name_or_path is missing"),
        ("train tiny-lora tiny-full", "unexpected argument 'tiny-full'"),
        ("train my.jsonl", "'my.jsonl' is not a preset; pass data with --dataset_name my.jsonl"),
        ("train tiny-lora data/", "'data/' is not a preset; pass data with --dataset_name data/"),
        ("data my.parquet", "'my.parquet' is not a preset; pass data with --dataset_name my.parquet"),
        ("plan my.csv", "'my.csv' is not a preset; pass data with --dataset_name my.csv"),
        ("train own.yaml", "'own.yaml' is not a preset; pass a config file with --config own.yaml"),
        ("train tiny-lora --preset tiny-full", "two presets"),
        ("train tiny-lora --seed", "--seed"),
        ("train tiny-lora --strategy", "--strategy has no value"),
        ("train tiny-lora --strategy ddp --strategy ddp", "--strategy is given twice"),
        ("train tiny-lora --num_processes 3", "is not divisible"),
        ("train tiny-lora --strategy single --num_processes 2", "one process"),
        ("train tiny-lora --strategy missing.yaml", "cannot read missing.yaml"),
        ("train --config missing.yaml --nonsense 1", "cannot read missing.yaml"),
        ("train tiny-lora --gpus 0,0", "GPU 0 twice"),
        ("train tiny-lora --max_length many", "max_length='many'"),
        ("train tiny-lora --run_name a\x07b", "control characters"),
        ("train tiny-lora --output_dir file/x", "is a file, not a folder"),
        ("demo tiny-qlora", "use tiny-full, tiny-lora, tiny-dpo, tiny-kto, tiny-distill, tiny-reward, tiny-grpo"),
        ("demo --gpus x", "is not a GPU id"),
        ("demo --num_processes 3", "is not divisible"),
        ("record tiny-distill --teacher embedded", "folder is not set; name the folder to write: --folder DIR"),
        ("record tiny-distill --teacher embedded --folder x --top_k 0", "top_k='0' is not a valid number of tokens"),
        ("record tiny-distill --folder x", "teacher is not set, with objective=distill"),
        ("record tiny-full --objective sft --teacher embedded --folder x", "with objective=sft: only a teacher is"),
        ("record tiny-dpo --teacher embedded --folder x", "with objective=dpo: only a teacher is recorded"),
        ("record tiny-distill --teacher embedded --folder file", "cannot be written: Not a directory"),
        ("record tiny-distill --teacher embedded --folder .", "is not empty"),
        ("train tiny-distill --teacher embedded --teacher_log_probs x", "which it takes the place of"),
        (
            "prove tiny-lora --objective grpo --max_completion_length 9 --sampler_url http://x:1",
            "in a proof: a server's answers are not",
        ),
        ("trian", "Did you mean 'train'?"),
        ("runs shwo", "No such command"),
        ("runs list --jsn", "--jsn"),
        ("runs show nowhere", "there is no run 'nowhere'"),
        ("runs list --runs_dir file", "'file' is a file"),
        ("stop x --runs_dir file", "'file' is a file"),
        ("runs logs ../x", "may not contain `..`"),
        ("stop /etc", "is not a run folder"),
        ("stop", "RUN"),
        ("resume", "resume takes one run"),
        ("resume a b", "resume takes one run"),
        ("resume nowhere", "there is no run"),
        ("export nowhere", "there is no run"),
        ("stop x --timeout soon", "timeout='soon'"),
        ("stop x --timeout -1", "timeout='-1'"),
    ],
)
def test_a_slip_gets_one_line_and_status_2(words: str, part: str, shell: Shell) -> None:
    Path("file").write_text("x")
    assert shell(*words.split(" ")) == 2
    assert any(part in line for line in shell.errors), shell.errors
    assert all(line.startswith("error: ") for line in shell.errors)
    assert not Path("runs").exists()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_a_name_that_the_terminal_cannot_show_is_escaped(encoding: str) -> None:
    """A file of another system may have a name that is not UTF-8; a terminal may have an old encoding."""
    env = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT)}

    def printed(code: str) -> str:
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, check=False)
        assert b"Traceback" not in ended.stderr, ended.stderr
        return ended.stdout.decode(encoding)

    argv = ["tunesmith", "runs", "show", "caf\udce9-\u20ac", "--json"]
    refusal = printed(f"import sys; sys.argv = {argv!a}; from app.cli import main; main()")
    assert "is not a run" in json.loads(refusal)["mistakes"][0]
    text = printed(r"from app.console import *; prepare_streams(); report('\u20ac')")
    assert text == ("\u20ac\n" if encoding == "utf-8" else "\\u20ac\n")


def test_streams_that_are_closed_or_full_give_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    # tests/forked.py gives its programs streams of its own.
    monkeypatch.setenv("BY_HAND", "1")

    def status_and_errors(verb: str, redirection: str) -> tuple[int, str]:
        command = ["sh", "-c", f'"$0" -m app.cli {verb} {redirection}', sys.executable]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        return ended.returncode, ended.stderr

    assert status_and_errors("presets", ">&-") == (0, "")
    assert status_and_errors("presets --json", "<&- >&- 2>&-") == (0, "")
    full = (1, "error: system: No space left on device; make room, or check its permissions\n")
    assert status_and_errors("strategies --json", ">/dev/full") == full
    assert status_and_errors("strategies", ">/dev/full") == full


def test_with_json_the_mistakes_are_the_document(shell: Shell) -> None:
    assert shell("train", "nothing-like-it", "--json") == 2
    assert len(json.loads(shell.out)["mistakes"]) == len(shell.errors) == 1


def test_a_value_may_look_like_anything(shell: Shell) -> None:
    """A value is one word of an argv and no shell's, no flag's and no path's business."""
    for value in ("run; touch hacked", "$(touch hacked)", "`touch hacked`", "a&&touch hacked", "🙂"):
        assert shell("train", "tiny-lora", "--dataset_name", "/nowhere", "--run_name", value, "--seed", "x") == 2
        assert len(shell.errors) == 1
    assert not Path("hacked").exists()


def test_a_used_folder_is_refused(shell: Shell) -> None:
    run = RunFolder("runs/used")
    run.create()
    run.write_state(state="done")
    assert shell("train", "tiny-lora", "--output_dir", "runs/used") == 2
    assert "holds a run" in shell.errors[0]


@pytest.mark.parametrize(("state", "part"), [("done", "is done"), ("running", "stop it first")])
def test_only_stopped_and_failed_runs_resume(state: str, part: str, shell: Shell) -> None:
    from trainers.run.folder import Process

    run = RunFolder("runs/a")
    run.create()
    run.config.write_text("preset: tiny-lora\n")
    run.write_state(state=state, processes=[Process.of("launcher").as_json()])
    assert shell("resume", "a") == 2
    assert part in shell.errors[0]


def test_what_a_resume_cannot_change_is_refused(shell: Shell) -> None:
    run = RunFolder("runs/a")
    run.create()
    run.config.write_text("preset: tiny-lora\n")
    run.accelerate.write_text((ROOT / "accelerate_configs" / "ddp.yaml").read_text())
    run.write_state(state="stopped")
    assert shell("resume", "a", "--output_dir", "b", "--preset", "tiny-full", "--max_stps", "9") == 2
    assert ["output_dir" in shell.errors[0], "preset" in shell.errors[1], "max_steps" in shell.errors[2]] == [True] * 3


def test_a_disk_that_is_too_small_is_refused_before_anything_starts(shell: Shell, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    weight = {"dtype": "BF16", "shape": [2**20, 2**20], "data_offsets": [0, 2**41]}
    header = json.dumps({"model.layers.0.mlp.up_proj.weight": weight}).encode()
    with open(model / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**41)
    assert shell("train", "tiny-full", "--model_name_or_path", str(model)) == 2
    assert f"needs at least {14 * 2**40 + 2_000_000:,} bytes, for 1 checkpoint and the export" in shell.errors[0]
    assert "are free" in shell.errors[0]


def test_catalogues_and_lists_are_json_when_asked(shell: Shell) -> None:
    for words in (["presets"], ["strategies"]):
        assert shell(*words, "--json") == 0
        rows = json.loads(shell.out)
        assert all(row["name"] and row["summary"] for row in rows)
        assert rows
        assert shell(*words) == 0
        assert rows[0]["name"] in shell.out
    assert shell("runs", "list", "--json") == 0
    assert json.loads(shell.out) == []


def test_runs_are_listed_shown_and_read(shell: Shell) -> None:
    run = RunFolder("runs/one")
    run.create()
    run.config.write_text("preset: tiny-lora\n")
    run.write_state(state="failed", cause="rank 1: ValueError: <b>\x1b[31mred", step=4, total_steps=8)
    run.metrics.write_text('{"step": 4, "loss": NaN, "eval_loss": 0.5}\n')
    run.log.write_text("2026 [rank 0] \x1b]0;owned\x07hello\n")
    assert shell("runs", "list") == 0
    assert "one  failed  4/8   tiny-lora" in shell.out
    assert "\x1b" not in shell.out
    assert shell("runs", "list", "--json") == 0
    assert json.loads(shell.out)[0]["cause"].startswith("rank 1: ValueError")
    assert shell("runs", "show", "one", "--json") == 0
    assert json.loads(shell.out)["metrics"] == {"step": 4, "loss": None, "eval_loss": 0.5}
    assert shell("runs", "show", "one") == 0
    assert shell.errors[0] == "cause: ValueError: <b>red"
    assert "tunesmith resume" in shell.errors[-1]
    assert shell("runs", "logs", "one") == 0
    assert shell.out == "2026 [rank 0] hello\n"


@pytest.mark.parametrize(("state", "status"), [("done", 0), ("failed", 1), ("stopped", 130)])
def test_whoever_follows_a_log_learns_how_the_run_has_ended(state: str, status: int, shell: Shell) -> None:
    run = RunFolder("runs/one")
    run.create()
    run.write_state(state=state)
    run.log.write_text("the last line\n")
    assert shell("runs", "logs", "one", "--follow") == status
    assert shell.out == "the last line\n"
    assert shell("runs", "logs", "one") == 0


def test_stopping_what_has_ended_says_so(shell: Shell) -> None:
    run = RunFolder("runs/one")
    run.create()
    run.write_state(state="running", processes=[])
    assert shell("stop", "one") == 0
    assert "had already ended, failed" in shell.out
    assert not [line for line in shell.errors if "saving a checkpoint" in line]
    assert shell("stop", "one", "--json") == 0
    assert json.loads(shell.out)["already_ended"] is True


def test_an_export_replaces_nobodys_files(shell: Shell, tmp_path: Path) -> None:
    run = RunFolder("runs/one")
    run.create()
    run.config.write_text("preset: tiny-lora\n")
    run.write_state(state="done")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text.txt").write_text("x")
    for place in ("thesis", "thesis/text.txt"):
        assert shell("export", "one", "--output", place) == 2
        assert "holds other files" in shell.errors[0]
    assert (tmp_path / "thesis" / "text.txt").exists()


def test_the_demos_next_commands_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from app.command_line import TRAIN
    from app.commands.demo import _next_commands
    from app.launch.job import train_job

    (tmp_path / "my.jsonl").write_text("{}\n")
    for number in ("1", "2"):
        commands = _next_commands(train_job(TRAIN.read(["tiny-lora", "--num_processes", number])))
        jobs = [train_job(TRAIN.read(line.split()[2:])) for line in commands if line.startswith("tunesmith train")]
        assert (len(jobs), jobs[0].config.dataset_name) == (2, str(tmp_path / "my.jsonl"))
        assert commands[-1] == "tunesmith runs list"


def test_a_terminal_that_hung_up_is_no_crash(tmp_path: Path) -> None:
    """The reader of a pipe may leave at any time."""
    code = "from app.cli import main; import sys; sys.argv = ['tunesmith', 'train', '--help']; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""


def test_an_export_of_the_wrong_kind_is_refused(shell: Shell) -> None:
    run = RunFolder("runs/one")
    run.create()
    run.config.write_text("preset: tiny-full\n")
    run.write_state(state="done")
    assert shell("export", "one", "--merged") == 2
    assert "no adapter to merge" in shell.errors[0]


@pytest.mark.parametrize(
    "option", ["dataset_name", "model_name_or_path", "runs_dir", "output_dir", "eval_dataset_name", "cache_dir"]
)
def test_a_name_that_no_file_system_holds_is_a_mistake(option: str, shell: Shell) -> None:
    assert shell("train", "tiny-lora", f"--{option}", "x" * 300, "--json") == 2
    (mistake,) = json.loads(shell.out)["mistakes"]
    assert mistake.startswith(f"{option}=xxx")
    assert len(mistake) < 200


@pytest.mark.parametrize("url", ["s3://bucket/x", "s3:/bucket/x"])
@pytest.mark.parametrize("option", ["runs_dir", "output_dir", "cache_dir"])
def test_a_url_is_no_folder(option: str, url: str, shell: Shell) -> None:
    """Otherwise the run would be in a local folder called `s3:`, and nothing in the bucket."""
    assert shell("train", "tiny-lora", f"--{option}", url, "--json") == 2
    (mistake,) = json.loads(shell.out)["mistakes"]
    assert mistake.startswith(f"{option}={url} is a URL; give a local folder")


def test_an_error_of_the_system_is_a_document_too(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*more: object) -> int:
        raise OSError(28, "No space left on device", "/full")

    monkeypatch.setattr("app.commands.runs.list_verb", fail)
    assert shell("runs", "list", "--json") == 1
    assert json.loads(shell.out)["state"] == "failed"
    assert "/full: No space left" in shell.errors[0]


def test_an_export_into_a_file_or_an_endless_name_is_refused(shell: Shell) -> None:
    run = RunFolder("runs/one")
    run.create()
    run.config.write_text("preset: tiny-lora\n")
    run.write_state(state="done")
    Path("file").write_text("x")
    for place in ("/etc/passwd/x", "file/x", "y" * 300):
        assert shell("export", "one", "--output", place, "--json") == 2
        assert json.loads(shell.out)["mistakes"][0].startswith("output=")
        assert "cannot be created" in shell.errors[0]


@pytest.mark.parametrize("words", ["", "train", "resume", "runs", "runs list", "runs logs", "export", "stop", "demo"])
@pytest.mark.parametrize("width", ["60", "80", "120"])
def test_help_is_whole_on_any_width(words: str, width: str, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert shell(*words.split(), "-h") == 0
    short = shell.out
    assert shell(*words.split(), "--help") == 0
    assert shell.out == short
    assert "<bool>" not in short
    if words == "train":
        names = set(short.replace("\n", " ").split())
        assert [name for name in TrainConfig.model_fields if name != "preset" and f"--{name}" not in names] == []
        assert max(map(len, short.splitlines())) <= max(int(width), 90)


def on_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)


@pytest.mark.parametrize("width", [30, 80, 200])
def test_a_list_keeps_the_ids_whole_and_a_line_per_run(
    width: int, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [f"20261121-10153{number}-tiny-lora-a-long-name-2s{number}" for number in range(2)]
    for name in ids:
        run = RunFolder(f"runs/{name}")
        run.create()
        run.config.write_text("preset: tiny-lora\n")
        run.write_state(state="failed", cause="rank 1: ValueError: " + "long " * 30, step=4, total_steps=8)
    on_terminal(monkeypatch, width)
    assert shell("runs", "list") == 0
    lines = [line for line in shell.out.splitlines() if line.strip()]
    assert len(lines) == 4, shell.out
    assert all(any(name in line and "failed" in line for line in lines) for name in ids)
    assert ("cause" in lines[0]) == (width == 200)
    assert "state" in lines[0]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("prove tiny-lora --steps {}", "is not a valid number of steps; write 1 to"),
        ("prove tiny-lora --layers {}", "is not a valid number of layers"),
        ("bench tiny-lora --steps {}", "is not a valid number of steps; use"),
        ("data tiny-lora --rows {}", "is not a valid number of rows; give"),
        ("train tiny-lora --num_machines {} --machine_rank 0", "is not a whole number from 1 to"),
        ("train tiny-lora --num_processes {}", "num_processes="),
    ],
)
@pytest.mark.parametrize("digits", ["9" * 5000, "0" * 12 + "9" * 12, "²", "-1"])
def test_a_number_however_long_is_one_sentence(words: str, line: str, digits: str, shell: Shell) -> None:
    assert shell(*words.format(digits).split()) == 2
    (error,) = [error for error in shell.errors if line in error]
    assert len(error) < 300


@given(st.integers(-5, 10**9), st.integers(0, 12), st.integers(0, 99), st.integers(100, 10**6))
def test_a_whole_number_is_read_as_int_reads_it(number: int, zeros: int, least: int, most: int) -> None:
    text = f"{'0' * zeros}{number}" if number >= 0 else str(number)
    assert whole_number(text, least, most) == (number if least <= number <= most else None)
    assert whole_number(f"{text} ", least, most) is None
