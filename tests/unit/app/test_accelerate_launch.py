"""Command lines: the words that are started, and the line that a person can paste."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from app.accelerate_launch import (
    ROOT,
    TRAIN_SCRIPT,
    check_argv,
    check_environment,
    command_line,
    launch_argv,
    launch_environment,
    module_argv,
    module_environment,
    read_command_line,
)
from app.hardware import Devices, cpu_count
from tests.launching import shadow_modules
from trainers.run.folder import RunFolder
from trainers.strategy.strategy import from_launcher, load_strategy, resolve

CPU_2, GPUS = Devices([], 2), Devices([0, 2], 2)
HOSTILE = [
    "plain",
    "with space",
    'it\'s "quoted"',
    "$(touch x); `id` && a|b > c",
    "ünï-日本-🙂",
    "--config_file=x",
    "a\\b",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_the_line_comes_back_as_the_same_words(name: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / name)
    ids, words = read_command_line(command_line(run, GPUS))
    assert ids == [0, 2]
    assert [*words, "--output_dir", str(run.path)] == launch_argv(run, 2)
    assert words[words.index("--config") + 1] == str(tmp_path / name / "config.yaml")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_shell_reads_the_line_as_the_same_words(name: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / name)
    line = command_line(run, GPUS)
    words = read_command_line(line)[1]
    code = 'import os, sys; print([os.environ["CUDA_VISIBLE_DEVICES"], *sys.argv[1:]])'
    echoed = line.replace(sys.executable, shlex.join([sys.executable, "-c", code]), 1)
    out = subprocess.run(["sh", "-c", echoed], capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    assert out.strip() == repr(["0,2", *words[1:]])


def test_the_line_names_gpus_only_where_some_are_chosen(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert command_line(run, GPUS).startswith("CUDA_VISIBLE_DEVICES=0,2 ")
    assert "CUDA" not in command_line(run, CPU_2)
    assert "--output_dir" not in command_line(run, CPU_2)


@pytest.mark.parametrize("line", ["", "'unclosed", "CUDA_VISIBLE_DEVICES=GPU-12ab python x"])
def test_a_line_from_elsewhere_is_read_without_ids(line: str) -> None:
    assert read_command_line(line)[0] == []


@pytest.mark.parametrize("processes", [1, 2])
def test_the_launcher_takes_a_free_port(processes: int, tmp_path: Path) -> None:
    """Also for one process, as FSDP has a process group of it: two such runs at once would meet on port 29500."""
    argv = launch_argv(RunFolder(tmp_path), processes, "auto")
    assert argv[:4] == [sys.executable, "-P", "-m", "accelerate.commands.launch"]
    assert argv[argv.index("--main_process_port") + 1] == "0"
    assert argv[-2:] == ["--resume_from_checkpoint", "auto"]
    assert TRAIN_SCRIPT == ROOT / "trainers" / "train.py"


@pytest.mark.parametrize("processes", [1, 3])
def test_the_training_script_reads_the_strategy_back_from_the_argv(processes: int, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a b")
    run.create()
    wanted = resolve(load_strategy("ddp" if processes > 1 else "single"), processes, "no")
    run.accelerate.write_text(wanted.dump())
    found = from_launcher(launch_argv(run, processes), "train.py")
    assert {key: value for key, value in found.values.items() if key != "main_process_port"} == wanted.values


def test_the_environment_keeps_what_the_user_set(tmp_path: Path) -> None:
    made = launch_environment(CPU_2, {"HOME": "/h"})
    assert made["OMP_NUM_THREADS"] == str(max(1, cpu_count() // 2))
    assert (made["HOME"], made["TUNESMITH_SUPERVISED"]) == ("/h", "1")
    assert "CUDA_VISIBLE_DEVICES" not in made
    assert launch_environment(Devices([], 500), {})["OMP_NUM_THREADS"] == "1"
    assert launch_environment(CPU_2, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    assert launch_environment(GPUS, {"CUDA_VISIBLE_DEVICES": "0,1,2"})["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert launch_environment(CPU_2, {"GLIBC_TUNABLES": "own"})["GLIBC_TUNABLES"] == "own"
    assert "GLIBC_TUNABLES" not in launch_environment(GPUS, {})


def test_the_check_knows_the_world_and_has_no_launcher(tmp_path: Path) -> None:
    argv = check_argv(tmp_path / "config.yaml")
    assert argv == [sys.executable, str(TRAIN_SCRIPT), "--check", "--config", str(tmp_path / "config.yaml")]
    made = check_environment(GPUS, tmp_path / "accelerate.yaml", {})
    assert made["TUNESMITH_STRATEGY"] == str(tmp_path / "accelerate.yaml")
    assert "TUNESMITH_SUPERVISED" not in made


def test_no_child_imports_from_the_working_folder(tmp_path: Path) -> None:
    """Nor does what it starts in its turn: a rank, a worker; an absolute folder that the user named stays."""
    shadow_modules(tmp_path)
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import yaml, queue, json']); import yaml"
    (tmp_path / "named").mkdir()
    for named in ("", ".", os.pathsep, f".{os.pathsep}{tmp_path / 'named'}"):
        outer = {**os.environ, "PYTHONPATH": named}
        made = [launch_environment(CPU_2, outer), check_environment(CPU_2, tmp_path / "a.yaml", outer)]
        for env in [*made, module_environment(outer)]:
            done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
            assert (done.returncode, done.stdout) == (0, ""), done.stdout
            assert str(tmp_path / "named") not in named or str(tmp_path / "named") in env["PYTHONPATH"]
    control = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert control.stdout == "yaml.py of the working folder\n" * 2


def test_a_rank_that_is_launched_by_hand_imports_nothing_from_the_working_folder(tmp_path: Path) -> None:
    shadow_modules(tmp_path)
    for variables in ({}, {"PYTHONPATH": ":."}, {"PYTHONSAFEPATH": "1"}):
        env = {**os.environ, **variables}
        done = subprocess.run(
            [sys.executable, str(TRAIN_SCRIPT)], env=env, cwd=tmp_path, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (2, ""), done.stdout
        assert "without a launcher" in done.stderr


def test_programs_of_trainers_are_found_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "__init__.py").write_text("raise SystemExit('the wrong trainers')")
    argv = module_argv("trainers.config.parse", [])
    env = module_environment({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert subprocess.run(argv, env=env, cwd=ROOT, check=False).returncode == 0
