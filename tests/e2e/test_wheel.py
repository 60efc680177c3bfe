"""The wheel: built, installed into a clean environment, and its demo run from another folder."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.e2e.test_start import bare_environment
from tests.launching import ROOT, environment


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy, so that a build folder in the clone is neither used nor left behind
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.split("\0")[:-1]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_what_a_run_needs_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"app", "trainers", "accelerate_configs"} | (
        {"ui"} if (ROOT / "ui" / "__init__.py").exists() else set()
    )
    for folder, pattern in (
        ("trainers/config/presets", "*.yaml"),
        ("accelerate_configs", "*.yaml"),
        ("trainers/embedded", "*"),
    ):
        for path in (ROOT / folder).rglob(pattern):
            if path.is_file() and "__pycache__" not in path.parts:
                assert str(path.relative_to(ROOT)) in names
    assert Path(wheel).stat().st_size < 10_000_000


def test_the_demo_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """Exact match on held-out examples, by generation: none before, at least nine of ten after."""
    python = bare_environment(tmp_path / "venv")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [str(python.parent / "tunesmith"), "demo", "--json"]
    done = subprocess.run(command, cwd=elsewhere, env=environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    document = json.loads(done.stdout)
    keys = ["run_dir", "strategy", "world_size", "train_seconds", "tokens_per_second", "before", "after"]
    assert set(keys) <= set(document)
    assert (document["strategy"], document["world_size"], document["metric"]) == ("ddp", 2, "exact_match")
    assert document["before"]["exact_match"] <= 0.05
    assert document["after"]["exact_match"] >= 0.9
    assert document["after"]["eval_loss"] < document["before"]["eval_loss"]
    assert document["tokens_per_second"] > 0
    assert Path(document["run_dir"]).parent == elsewhere / "runs"
    text = (Path(document["run_dir"]) / "command.txt").read_text()
    assert str(tmp_path / "venv") in text
    assert str(ROOT) not in text
