"""What a run started by hand does at its start: Accelerate's traps are refused, one run folder is made anywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launching import ROOT, Finished, environment, flags, launch, launch_well, shadow_modules
from trainers.config.parse import Request
from trainers.parallel.zero import extensions_folder
from trainers.run.folder import RunFolder

SHORT: dict[str, Any] = {"preset": "tiny-lora", "max_steps": 2, "max_train_samples": 200, "eval_dataset_name": "none"}


def strategy_file(folder: Path, **values: Any) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"distributed_type": "MULTI_CPU", "num_processes": 2}, "distributed_type=MULTI_CPU starts one process"),
        (
            {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_verzion": 2}},
            "fsdp_config.fsdp_verzion: unknown Accelerate key fsdp_verzion; did you mean fsdp_version?",
        ),
    ],
)
def test_silent_fallbacks_of_accelerate_are_refused(values: dict[str, Any], line: str, tmp_path: Path) -> None:
    """Stock Accelerate would train one process, two independent runs, or plain DDP, and say nothing."""
    finished = launch(tmp_path / "run", 2, SHORT, strategy=strategy_file(tmp_path, **values))
    assert finished.status != 0
    assert line in finished.output
    assert not (tmp_path / "run").exists()


def test_the_cpu_flag_is_refused(tmp_path: Path) -> None:
    """`--cpu --num_processes 2` starts one process in stock Accelerate."""
    finished = launch(tmp_path / "run", 2, SHORT, launcher_flags=("--cpu",), by_hand=True)
    assert finished.status != 0
    assert "the launcher was given --cpu" in finished.output


def test_use_cpu_is_one_run_of_two_ranks(tmp_path: Path) -> None:
    """Stock Accelerate makes two independent runs of `MULTI_GPU` with `use_cpu: true`, both rank 0."""
    own = strategy_file(tmp_path, distributed_type="MULTI_GPU", num_processes=2, use_cpu=True)
    finished = launch_well(tmp_path / "run", 2, SHORT, strategy=own, by_hand=True)
    ranks = [entry["rank"] for entry in finished.state["processes"] if entry["role"] == "rank"]
    assert ranks == [0, 1]
    assert "processes        2" in finished.output
    assert "wrapper          DistributedDataParallel" in finished.output


SELF_CHECK = """
import sys
from accelerate import Accelerator
from trainers import build
from trainers.config.parse import Request
from trainers.run.errors import TrainingError
from trainers.strategy.mesh import Mesh, MeshSizes
from trainers.parallel.ranks import Ranks
from trainers.monitor.self_check import compare, refuse_differences
from trainers.strategy.strategy import load_strategy
config = Request(preset="tiny-lora").resolve()
made = Accelerator()  # without the adaptation
ranks = Ranks(made.device)
loss = build.module(config, True)
mesh = Mesh(MeshSizes())
backend, dtypes = build.backend(config, load_strategy("ddp"), made, ranks, mesh, loss)
try:
    refuse_differences(compare(load_strategy("ddp"), config, made, mesh, backend, loss, dtypes), ranks)
except TrainingError as error:
    sys.stdout.write(f"REFUSED {error}\\n")
"""


def test_the_self_check_stops_a_run_that_is_not_the_one_asked_for() -> None:
    """Control: stock Accelerate's two runs of one process each do not get past the self-check."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    command += ["--no-python", sys.executable, "-c", SELF_CHECK]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=500, check=True, cwd=ROOT)
    refusals = [line for line in done.stdout.splitlines() if line.startswith("REFUSED")]
    assert len(refusals) == 2
    assert all("processes: requested 2, got 1" in line for line in refusals)
    assert all("wrapper: requested DistributedDataParallel, got none" in line for line in refusals)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"preset": "tiny-lora", "lerning_rate": 1e-3}, "lerning_rate is not an option; did you mean learning_rate?"),
        ({"preset": "tiny-lora", "global_batch_size": 7}, "global_batch_size=7 is not divisible"),
        ({"preset": "tiny-lora", "model_name_or_path": "/nowhere"}, "model_name_or_path=/nowhere"),
    ],
)
def test_a_wrong_request_is_one_line_by_hand_too(options: dict[str, Any], line: str, tmp_path: Path) -> None:
    finished = launch(tmp_path / "run", 2, options)
    assert finished.status != 0
    assert finished.output.count(line) == 1
    assert finished.state.get("state") in (None, "failed")


def test_a_folder_with_a_run_is_not_written_over(tmp_path: Path) -> None:
    first = launch_well(tmp_path / "run", 1, SHORT)
    before = {path: path.read_bytes() for path in first.run.path.rglob("*") if path.is_file()}
    again = launch(tmp_path / "run", 2, SHORT)
    assert again.status != 0
    assert "holds a run; resume it" in again.output
    assert {path: path.read_bytes() for path in first.run.path.rglob("*") if path.is_file()} == before


def test_without_a_launcher_it_says_how_to_start(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "trainers" / "train.py"), *flags(SHORT)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("train.py was started without a launcher; use `accelerate launch")
    assert "Traceback" not in done.stderr


def bare_environment(folder: Path) -> Path:
    """A Python with the dependencies and no Tunesmith: a `.pth` adds a folder, not what is installed editable in it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    site = [path for path in sys.path if path.endswith("site-packages")]
    target = next((folder / "lib").glob("python3*")) / "site-packages" / "dependencies.pth"
    target.write_text("\n".join(site) + "\n")
    found = subprocess.run([python, "-c", "import trainers"], capture_output=True, cwd=folder)
    assert found.returncode != 0
    return python


@pytest.mark.parametrize("installed", [False, True], ids=["not installed", "beside an installed one"])
def test_a_clone_runs_from_another_folder(installed: bool, tmp_path: Path) -> None:
    """The clone's own packages are used, whatever is installed."""
    clone = tmp_path / "clone"
    clone.mkdir()
    for top in ("app", "trainers", "accelerate_configs"):
        shutil.copytree(ROOT / top, clone / top, ignore=shutil.ignore_patterns("__pycache__"))
    python = Path(sys.executable) if installed else bare_environment(tmp_path / "venv")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shadow_modules(elsewhere)
    command = [str(python), "-P", "-m", "accelerate.commands.launch", "--config_file"]
    command += [str(clone / "accelerate_configs" / "single.yaml"), str(clone / "trainers" / "train.py"), *flags(SHORT)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=500, cwd=elsewhere)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (elsewhere / "runs").iterdir()
    assert run.name.partition("tiny-lora")[1]
    assert str(clone / "trainers" / "train.py") in (run / "command.txt").read_text()
    files = ["accelerate.yaml", "command.txt", "config.yaml", "log.txt", "metrics.jsonl"]
    files += ["chat_template.json", "state.json"]
    found = {path.name for path in run.iterdir()} - {".lock", ".written.jsonl"}
    assert found == {*files, "checkpoints", "heartbeat", "model"}


def test_the_command_pasted_into_a_terminal_is_the_same_run_again(tmp_path: Path) -> None:
    folder = tmp_path / "with space and 'quote' ünï"
    folder.mkdir()
    options = {**SHORT, "runs_dir": folder / "the runs", "run_name": 'a "b" $(c)'}
    first = launch_well(folder / "run", 2, options)
    line = first.run.command.read_text().strip()
    clean = {key: value for key, value in environment().items() if key != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(["bash", "-c", line], env=clean, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (again,) = (folder / "the runs").iterdir()
    assert Request(config=str(again / "config.yaml")).resolve() == Request(config=str(first.run.config)).resolve()
    assert (again / "accelerate.yaml").read_text() == first.run.accelerate.read_text()
    assert Finished(RunFolder(again), 0, "").series("loss") == first.series("loss")


def test_a_secret_of_the_environment_is_in_no_file(tmp_path: Path) -> None:
    secret = "hf_" + os.urandom(12).hex()
    finished = launch_well(tmp_path / "run", 1, {**SHORT, "run_name": "quiet"}, by_hand=True, HF_TOKEN=secret)
    for path in finished.run.path.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes()
    assert secret not in finished.output


def test_the_environment_does_not_divide_the_gradients(tmp_path: Path) -> None:
    """Accelerate divides the loss by this variable's value; accumulation is derived from the global batch alone."""
    plain = launch_well(tmp_path / "plain", 1, SHORT)
    other = launch_well(tmp_path / "other", 1, SHORT, ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4")
    assert plain.series("grad_norm") == other.series("grad_norm")


def test_a_live_run_is_not_joined_by_another(tmp_path: Path) -> None:
    finished = launch_well(tmp_path / "run", 1, SHORT)
    before = {path: path.read_bytes() for path in finished.run.path.rglob("*") if path.is_file()}
    with finished.run.hold():
        again = launch(tmp_path / "run", 1, {**SHORT, "max_steps": 3, "resume_from_checkpoint": "auto"})
    assert again.status != 0
    assert "is already running" in again.output
    assert {path: path.read_bytes() for path in finished.run.path.rglob("*") if path.is_file()} == before


def test_the_untrained_weights_can_be_the_best(tmp_path: Path) -> None:
    options = {**SHORT, "eval_dataset_name": "embedded", "max_eval_samples": 20, "learning_rate": 5, "method": "full"}
    more = {"eval_on_start": True, "load_best_model_at_end": True}
    finished = launch_well(tmp_path / "run", 1, {**options, **more})
    first, last = (row["eval_loss"] for row in finished.rows("eval_loss"))
    assert first < last
    assert "| exported_step | 0 |" in (finished.run.model / "README.md").read_text()


def test_the_last_checkpoint_knows_the_last_evaluation(tmp_path: Path) -> None:
    """Saved by `save_steps` before the final evaluation found it the best, it would name an older one."""
    more = {"eval_dataset_name": "embedded", "max_eval_samples": 16, "eval_steps": 3, "save_steps": 4, "max_steps": 4}
    finished = launch_well(tmp_path / "run", 1, SHORT | more | {"load_best_model_at_end": True})
    losses = {row["step"]: row["eval_loss"] for row in finished.rows("eval_loss")}
    assert losses[4] < losses[3]
    manifest = json.loads((finished.checkpoints[-1] / "manifest.json").read_text())
    assert (manifest["step"], manifest["progress"]["best_step"]) == (4, 4)


def test_a_build_that_was_killed_hangs_no_later_run(tmp_path: Path) -> None:
    """torch's builder waits for ever on the lock file that such a build leaves."""
    built = extensions_folder()
    cache = tmp_path / built.relative_to(built.parents[2])
    if built.exists():
        shutil.copytree(built, cache)
    (cache / "deepspeed_shm_comm").mkdir(parents=True, exist_ok=True)
    (cache / "deepspeed_shm_comm" / "lock").touch()
    launch_well(tmp_path / "run", 2, SHORT, strategy="zero1", by_hand=True, XDG_CACHE_HOME=str(tmp_path))
    assert not (cache / "deepspeed_shm_comm" / "lock").exists()


def test_a_rank_is_gone_as_soon_as_its_end_has_run() -> None:
    """What is registered for the end runs, what is printed is read; modules are not taken apart."""
    program = """
import atexit
from trainers.run.launch import exit_now
class Apart:
    def __del__(self):
        print("taken apart")
kept = Apart()
atexit.register(print, "registered")
print("printed", end=" ")
{end}
"""
    ways = {
        end: subprocess.run(
            [sys.executable, "-c", program.replace("{end}", end)], cwd=ROOT, capture_output=True, text=True
        )
        for end in ("exit_now(3)", "raise SystemExit(3)")
    }
    assert {done.returncode for done in ways.values()} == {3}
    assert ways["exit_now(3)"].stdout == "printed registered\n"
    assert ways["raise SystemExit(3)"].stdout == "printed registered\ntaken apart\n", "Python's own way does"
