"""Every command in README and docs is run, but for those marked as needing a GPU or a network."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from app.runs.runs import true_state
from tests.e2e.test_commands import OPTIONS, TUNESMITH, start, steps_of, tunesmith, wait_for
from tests.launching import ROOT, SCRIPT, environment, free_port, launch, launch_well
from trainers.run.folder import RunFolder

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    block for page in PAGES for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
]
LINES = [line.partition("  #") for block in BLOCKS for line in block.splitlines() if line.strip()]
COMMANDS = list(dict.fromkeys(command.strip() for command, _, _ in LINES))
ELSEWHERE = {command.strip() for command, _, comment in LINES if re.search(r"needs a (network|GPU)", comment)}
MACHINES = [line for line in COMMANDS if line.startswith("tunesmith train") and "--num_machines" in line]
TRAINING = [line for line in COMMANDS if line.startswith("tunesmith train") and line not in MACHINES]
PLANNING = [line for line in COMMANDS if line.startswith(("tunesmith plan", "tunesmith data"))]
SWEEPING = [line for line in COMMANDS if line.startswith("tunesmith sweep")]
PROVING = [line for line in COMMANDS if line.startswith("tunesmith prove")]
CHECKING = [line for line in COMMANDS if line.startswith("tunesmith doctor")]
SERVING = [line for line in COMMANDS if line.startswith("tunesmith ui")]
MODEL_SERVING = [line for line in COMMANDS if line.startswith("tunesmith serve")]
MERGING = [line for line in COMMANDS if line.startswith("tunesmith merge")]
SHORT = "--max_steps 2 --quiet"


@pytest.mark.quick
def test_the_pages_have_these_commands() -> None:
    assert COMMANDS[:2] == ["make demo", "make test"]
    verbs = {line.split()[1] for line in COMMANDS if line.startswith("tunesmith")}
    assert verbs == {
        "presets", "strategies", "train", "data", "runs", "stop", "resume", "export", "chat", "ui", "prove", "plan",
        "doctor", "sweep", "eval", "push", "serve", "merge",
    }  # fmt: skip
    assert all(line.split()[0] in ("make", "tunesmith", "accelerate") for line in COMMANDS)
    assert len(ELSEWHERE) == 3
    assert all("qwen3" in line or "smollm2" in line for line in ELSEWHERE), "the others can be run here"


@pytest.mark.quick
def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in [line for line in COMMANDS if line.startswith("make ")]:
        assert re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE)


def own_data(folder: Path, count: int = 400) -> None:
    rows = [{"prompt": f"{number} plus 0 is ", "completion": str(number)} for number in range(count)]
    (folder / "my.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize("line", SWEEPING)
def test_sweeping_commands(line: str, tmp_path: Path) -> None:
    """All that happens before the first run: every trial is checked, and none started."""
    own_data(tmp_path)
    done = tunesmith(*shlex.split(line)[1:], "--check", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "check passed" in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("line", TRAINING)
def test_training_commands(line: str, tmp_path: Path) -> None:
    own_data(tmp_path)
    (tmp_path / "my.yaml").write_text("preset: tiny-lora\nlearning_rate: 1e-3\n")
    in_pods = "--on kubernetes" in line  # prints what pods would run; /shared is a folder of theirs
    words = shlex.split(line if in_pods else line.replace("/shared/", f"{tmp_path}/"))[1:]
    trains = not {"--check", "--dry_run"} & set(words)
    short = shlex.split(SHORT) if trains else []
    done = tunesmith(*words, *short, cwd=tmp_path)
    if line in ELSEWHERE:  # it must say so and leave nothing behind
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "runs").exists()
        return
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs").exists() == trains
    for folder in (tmp_path / "runs").glob("*"):
        wait_for(lambda folder=folder: true_state(RunFolder(folder))["state"] == "done")  # type: ignore[misc]


def test_two_machines(tmp_path: Path) -> None:
    """On loopback; the lines differ in nothing but the rank."""
    first, second = MACHINES
    assert first.replace("--machine_rank 0", "--machine_rank 1") == second
    programs, port = [], str(free_port())
    for machine, line in enumerate(MACHINES):
        here = line.replace("/shared/", f"{tmp_path}/").replace("10.0.0.1", "127.0.0.1").replace("29500", port)
        home = tmp_path / f"machine-{machine}"
        home.mkdir()
        env = environment(PYTHONPATH=str(ROOT), XDG_STATE_HOME=str(home))
        programs.append(subprocess.Popen([*TUNESMITH, *shlex.split(here)[1:], *shlex.split(SHORT)], cwd=home, env=env))
    try:
        assert [program.wait(timeout=400) for program in programs] == [0, 0]
    finally:
        for program in programs:
            program.terminate()
    assert (RunFolder(tmp_path / "two").read_state() or {})["state"] == "done"


def test_checks(tmp_path: Path) -> None:
    """On one machine, and on two of loopback, each of which prints the same report."""
    *single, first, second = CHECKING
    for line in single:
        done = tunesmith(*shlex.split(line)[1:], "--quick", cwd=tmp_path)  # speeds: tests/faults/test_doctor.py
        assert done.returncode == 0, done.stdout
    assert first.replace("--machine_rank 0", "--machine_rank 1") == second
    port, programs = str(free_port()), []
    for line in (first, second):
        words = shlex.split(line.replace("/shared", str(tmp_path)).replace("10.0.0.1", "127.0.0.1"))
        words = [*TUNESMITH, *words[1:], "--quick", "--main_process_port", port]
        env = environment(PYTHONPATH=str(ROOT), XDG_STATE_HOME=str(tmp_path / "state"))
        programs.append(subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True))
    reports = [program.communicate(timeout=400)[0] for program in programs]
    assert [program.returncode for program in programs] == [0, 0], reports
    assert reports[0] == reports[1]


@pytest.mark.quick
def test_commands_on_a_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "RUN")
    (tmp_path / "ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": 16}))
    own_data(tmp_path, 8)
    program = start(run, tmp_path)
    wait_for(lambda: steps_of(run) >= 3)
    others = [*TRAINING, *MACHINES, *SWEEPING, *PROVING, *PLANNING, *CHECKING, *SERVING, *MODEL_SERVING, *MERGING]
    lines = [line for line in COMMANDS if line.startswith("tunesmith") and line not in others]
    place = {"stop": 0, "resume": 1}
    for line in sorted(lines, key=lambda line: place.get(line.split()[1], 2)):
        if "OTHER" in line:  # RUN has ended by now
            shutil.copytree(run.path, tmp_path / "runs" / "OTHER")
        short = ["--answer_tokens", "4"] if line.startswith("tunesmith eval") else []
        done = tunesmith(*shlex.split(line)[1:], *short, cwd=tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    program.communicate(timeout=300)
    assert (run.read_state() or {})["step"] == OPTIONS["max_steps"]
    assert (tmp_path / "my-model" / "model.safetensors").exists()


@pytest.mark.quick
def test_the_pages_are_served(tmp_path: Path) -> None:
    (line,) = SERVING
    env = environment(PYTHONPATH=str(ROOT), XDG_STATE_HOME=str(tmp_path / "state"))
    words = [*TUNESMITH, *shlex.split(line)[1:]]
    program = subprocess.Popen(
        words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert program.stdout
        url = program.stdout.readline().strip()
        with urllib.request.urlopen(url, timeout=500) as answer:  # noqa: S310 - its own address
            assert b"Tunesmith" in answer.read()
        program.send_signal(signal.SIGTERM)
        assert program.wait(timeout=400) == 0
    finally:
        program.kill()


@pytest.mark.long
@pytest.mark.usefixtures("home")
def test_models_are_merged(tmp_path: Path) -> None:
    """Two runs, and the checkpoints of one; its rows are those of the run."""
    for number, name in enumerate(("RUN-A", "RUN-B")):
        options = {"preset": "tiny-lora", "max_steps": 3, "save_steps": 1, "seed": number, "max_eval_samples": 4}
        launch_well(tmp_path / "runs" / name, 1, {**options, "save_total_limit": 3})
    for line in MERGING:
        done = tunesmith(*shlex.split(line)[1:], "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert (Path(document["output_dir"]) / "adapter_model.safetensors").is_file()
        assert ("eval" in document) == ("--eval" in line)
    assert not list(tmp_path.glob(".*")), "nothing else is left"


@pytest.mark.long
@pytest.mark.usefixtures("home")
def test_models_are_served(tmp_path: Path) -> None:
    """A run's export and its checkpoint, one after the other; one line needs vLLM, and is refused without it."""
    run = RunFolder(tmp_path / "runs" / "RUN")
    launch_well(run.path, 1, {"preset": "tiny-lora", "max_steps": 2, "eval_dataset_name": "none"})
    token, names = "token-of-the-test", []
    for line in MODEL_SERVING:
        argv = [*TUNESMITH, *shlex.split(line.replace("step-00000100", "step-00000002"))[1:], "--port", "0"]
        env = environment(PYTHONPATH=str(ROOT), TUNESMITH_SERVE_TOKEN=token, CUDA_VISIBLE_DEVICES="")
        program = subprocess.Popen(
            argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert program.stdout
        assert program.stderr
        try:
            if "vllm" in line and importlib.util.find_spec("vllm") is None:
                assert "engine=vllm is not installed" in program.communicate(timeout=300)[1]
                assert program.returncode == 2
                continue
            url = program.stdout.readline().strip()
            request = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {token}"})  # noqa: S310
            with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310 - its own address
                names += [model["id"] for model in json.load(answer)["data"]]
            program.send_signal(signal.SIGTERM)
            assert program.wait(timeout=300) == 0
        finally:
            program.kill()
    assert names[:2] == ["RUN", "RUN@step-00000002"]


@pytest.mark.parametrize("line", PLANNING)
def test_what_starts_nothing(line: str, tmp_path: Path) -> None:
    own_data(tmp_path)
    done = tunesmith(*shlex.split(line)[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tokens" in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("line", PROVING)
def test_proof(line: str, tmp_path: Path) -> None:
    done = tunesmith(*shlex.split(line)[1:], "--max_train_samples", "300", cwd=tmp_path, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pass") == 3, done.stdout
    assert f"{line} --max_train_samples 300" in (next(tmp_path.glob("runs/prove-*")) / "report.md").read_text()


@pytest.mark.quick
def test_plain_accelerate(tmp_path: Path) -> None:
    (line,) = [line for line in COMMANDS if line.startswith("accelerate")]
    words = shlex.split(line)
    assert words[:3] == ["accelerate", "launch", "--config_file"]
    assert (ROOT / words[3]).exists()
    assert ROOT / words[4] == SCRIPT
    options = {name.removeprefix("--"): value for name, value in zip(words[5::2], words[6::2], strict=True)}
    finished = launch(tmp_path / "run", 2, {**options, "max_steps": 2, "eval_dataset_name": "none"})
    assert finished.state["state"] == "done", finished.output
