"""Forked programs stand for those that are started by hand, and are started by hand where they could not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.e2e.test_commands import tunesmith
from tests.forked import SCRIPTS, program_in


def test_a_launcher_with_a_space_in_its_command_line_is_started_by_hand() -> None:
    launcher = [sys.executable, "-P", "-m", "accelerate.commands.launch", "--config_file"]
    assert program_in([*launcher, "/a/b.yaml", SCRIPTS[0]]) == 2
    assert program_in([*launcher, "/a b/c.yaml", SCRIPTS[0]]) is None
    assert program_in([sys.executable, "-m", "app.cli", "runs", "show", "a b"]) == 1
    assert program_in([sys.executable, SCRIPTS[0], "--config", "/a b/c.yaml"]) == 1


@pytest.mark.long
def test_a_run_in_a_folder_with_a_space_trains(tmp_path: Path) -> None:
    words = ["tiny-lora", "--strategy", "ddp", "--num_processes", "2", "--max_steps", "2", "--global_batch_size", "4"]
    words += ["--max_train_samples", "20", "--eval_dataset_name", "none", "--output_dir", "a b"]
    done = tunesmith("train", *words, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
