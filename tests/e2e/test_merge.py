"""`tunesmith merge` as a command: killed in the middle, repeated, and what is done with its result."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from app.merge.command import _work_folder
from tests.e2e.test_commands import TUNESMITH, tunesmith, wait_for
from tests.launching import ROOT, environment
from tests.unit.tools.test_merge import adapter
from trainers.config.mistakes import ConfigError


def is_free(target: Path) -> bool:
    """Whether no merge into a folder is running."""
    try:
        with _work_folder(target):
            return True
    except ConfigError:
        return False


@pytest.mark.long
@pytest.mark.usefixtures("home")
def test_a_killed_merge_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    """Its program, which ends with it, holds the folder until then, and publishes nothing."""
    models = [str(adapter(tmp_path / name, seed)) for seed, name in enumerate(("ä 1", "b"))]
    out = tmp_path / "out"
    argv = ["merge", *models, "--method", "dare_linear", "--density", "0.5", "--seed", "7", "--output_dir", str(out)]
    program = subprocess.Popen([*TUNESMITH, *argv], cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)))
    wait_for(lambda: (tmp_path / ".out.merging" / "adapter").is_dir())
    (orphan,) = psutil.Process(program.pid).children()
    orphan.suspend()  # so that it does not end before the second merge looks
    program.send_signal(signal.SIGKILL)
    program.wait(timeout=60)
    second = tunesmith(*argv, cwd=tmp_path)
    assert (second.returncode, "is being written by another merge" in second.stderr) == (2, True), second.stderr
    orphan.resume()
    wait_for(lambda: is_free(out))
    assert not out.exists()
    done = tunesmith(*argv, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["seed"] == 7
    assert not list(tmp_path.glob(".*")), "what the killed merge has left is removed"
    again = tunesmith(*argv[:-1], str(tmp_path / "again"), cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (out, tmp_path / "again"))
    assert all((first[name] == second[name]).all() for name in first), "the same seed gives the same bits"
    answer = tunesmith("chat", str(out), "--prompt", "Hi", "--max_new_tokens", "3", "--json", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["tuned"] is not None
