"""The digest of the code that a checkpoint records: what a resume must not change without --force."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from trainers.run import compatibility
from trainers.run.compatibility import code_digest, refusals

CODE = '''"""What the module does."""

RATE = 0.5  # a comment
"""What the value is."""


def step(weight, gradient, names=()):
    """What the function does."""
    name = """text"""  # another
    return f"{name:>{len(names)}}", weight - RATE * gradient
'''


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def digest_of(folder: Path, code: str, name: str = "a.py") -> str:
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.py"):
        old.unlink()
    (folder / name).write_text(code)
    code_digest.cache_clear()
    return code_digest(folder)


def test_comments_docstrings_and_layout_are_no_change_of_the_code(tmp_path: Path) -> None:
    same = [
        CODE.replace("a comment", "a better one"), CODE.replace("  # another", ""), "# a header\n\n" + CODE,
        CODE.replace("What the function does.", "Takes a step.\n\n    Args:\n        weight: what to change.\n    "),
        CODE.replace('    """What the function does."""\n', ""), CODE.replace('"""What the value is."""\n', ""),
        CODE.replace("(weight, gradient, names=())", "(\n    weight,\n    gradient,\n    names=(),\n)"),
    ]  # fmt: skip
    assert CODE not in same
    assert {digest_of(tmp_path / "code", code) for code in same} == {digest_of(tmp_path / "code", CODE)}


def test_any_change_of_the_code_is_one(tmp_path: Path) -> None:
    """Control."""
    others = [
        CODE.replace("0.5", "0.25"), CODE.replace("weight - RATE", "weight + RATE"), CODE.replace('"text"', '"other"'),
        CODE.replace("names=()", "names=None"), CODE.replace("RATE * gradient", "gradient * RATE"),
        CODE.replace(":>{", ":<{"), CODE.replace("    return f", "    if weight:\n        return f"),
    ]  # fmt: skip
    digests = [digest_of(tmp_path / "code", code) for code in [CODE, *others]]
    assert len({*digests, digest_of(tmp_path / "code", CODE, "b.py")}) == len(others) + 2


def test_without_a_home_folder_it_is_computed_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    digest = digest_of(tmp_path / "code", CODE)
    written: list[Path] = []
    monkeypatch.setattr(compatibility, "cache_folder", no_home)
    monkeypatch.setattr(compatibility, "write_json", lambda path, value: written.append(path))
    assert digest_of(tmp_path / "code", CODE) == digest
    assert written == [], "a stand-in such as /dev/null would be replaced by a file"
    assert not Path(os.devnull).is_file()
    code_digest.cache_clear()


def test_it_is_computed_once_for_a_text(tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []

    def parse(source: bytes) -> ast.AST:
        parsed.append(source)
        return ast.parse(source)

    monkeypatch.setattr(compatibility, "ast", type("", (), {**vars(ast), "parse": staticmethod(parse)}))
    digest = digest_of(tmp_path / "code", CODE)
    assert (digest_of(tmp_path / "code", CODE), len(parsed)) == (digest, 1)
    [kept] = fresh_cache.rglob("*.json")
    kept.write_text("{")
    assert (digest_of(tmp_path / "code", CODE), len(parsed)) == (digest, 2)
    assert digest_of(tmp_path / "code", CODE.replace("0.5", "0.25")) != digest
    code_digest.cache_clear()


def test_a_schema_may_move_and_not_change() -> None:
    shape = {"lr_scheduler_type": "constant", "warmup_ratio": 0.0, "warmup_steps": 0}
    manifest = {"config": {**shape, "reward_schema": "a.json"}, "versions": {"the reward_schema": "01"}, "step": 2}
    moved = {**shape, "reward_schema": "b.json"}
    assert refusals(manifest, moved, {"the reward_schema": "01"}) == []
    (refused,) = refusals(manifest, moved, {"the reward_schema": "02"})
    assert "the reward_schema is 02, and was 01" in str(refused)
