"""The container image: its Dockerfile passes a linter, and all that is installed gets into it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HADOLINT = Path(sys.executable).with_name("hadolint")


def lint(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(HADOLINT), "-"], input=text, capture_output=True, text=True, timeout=60)


def test_the_linter_has_nothing_to_say() -> None:
    done = lint((ROOT / "Dockerfile").read_text())
    assert (done.returncode, done.stdout) == (0, "")


def test_the_linter_says_what_is_wrong() -> None:
    done = lint((ROOT / "Dockerfile").read_text() + "RUN cd /tmp && sudo ls\n")
    assert done.returncode == 1
    assert "DL3004" in done.stdout


def test_the_image_is_not_root_and_needs_a_password() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER ")] == ["USER 1000:1000"]
    assert "--auth" in next(line for line in lines if line.startswith("CMD "))


def test_every_package_gets_into_the_image_and_no_run_or_secret() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert rules[0] == "*"
    taken = {rule[1:] for rule in rules if rule.startswith("!")}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    needed = {name.partition(".")[0] for name in packages} | {"Makefile", "pyproject.toml", "constraints.txt"}
    assert taken == needed | {"README.md", "LICENSE"}
