"""The file of the answers to the same prompts, as attempts of a run leave it to the next."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trainers.config.validation import build
from trainers.run.answers_file import PromptLine, add_answers, begin_answers, forget_later
from trainers.run.folder import RunFolder
from trainers.train import build_answers

PROMPTS = [PromptLine(f"e.jsonl:{number}", f"p{number} é\r\u2028", "e") for number in (2, 0, 1)]
LABELS = [prompt.row for prompt in PROMPTS]


def answer(path: Path, step: int, labels: list[str] = LABELS) -> None:
    add_answers(path, step, [(label, f"{step}\n", True) for label in labels])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def steps(path: Path) -> list[int]:
    return [line["step"] for line in lines(path) if "step" in line]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two steps of three prompts."""
    path = tmp_path / "answers.jsonl"
    assert begin_answers(path, PROMPTS) == (LABELS, -1, [])
    answer(path, 4)
    answer(path, 8)
    return path


def test_a_prompt_is_written_once(path: Path) -> None:
    assert lines(path)[:3] == [vars(prompt) for prompt in PROMPTS]
    assert [set(line) for line in lines(path)[3:]] == [{"step", "row", "answer", "ended"}] * 6
    before, inode = path.read_bytes(), path.stat().st_ino
    assert begin_answers(path, PROMPTS) == (LABELS, 8, LABELS)
    assert (path.read_bytes(), path.stat().st_ino) == (before, inode)


def test_an_incomplete_last_step_is_answered_again(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    complete = path.read_bytes()
    answer(path, 12, LABELS[:2])
    path.write_bytes(path.read_bytes() + b'{"step": 12, "row": "e.jsonl:1", "ans')  # cut by a kill
    assert begin_answers(path, PROMPTS) == (LABELS, -1, [])
    assert path.read_bytes() == complete
    assert "removes the answers of step 12" in capsys.readouterr().out
    first = complete.splitlines(keepends=True)[:5]  # of the only step, too
    path.write_bytes(b"".join(first))
    assert begin_answers(path, PROMPTS) == (LABELS, -1, [])
    assert path.read_bytes() == b"".join(first[:3])


def test_other_prompts_of_a_later_attempt(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert begin_answers(path, PROMPTS[:2]) == (LABELS[:2], 8, LABELS), "fewer prompts"
    more = [*PROMPTS, PromptLine("e.jsonl:7", "p7", "")]
    assert begin_answers(path, more) == ([*LABELS, "e.jsonl:7"], 8, LABELS), "the new one has no answer at step 8"
    assert begin_answers(path, more) == ([*LABELS, "e.jsonl:7"], 8, LABELS), "an attempt that ended before it answered"
    assert steps(path) == [4] * 3 + [8] * 3
    assert lines(path)[3] == vars(more[3]), "before the answers"
    changed = [PromptLine("e.jsonl:0", "another text", "e"), PromptLine("e.jsonl:0", "a third", "e")]
    for _ in range(2):
        assert begin_answers(path, changed)[0] == ["e.jsonl:0 (2)", "e.jsonl:0 (3)"]
    assert steps(path) == [4] * 3 + [8] * 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("line", [b"7\n", b"[]\n", b"\xff\n", b'"step"\n', b'{"step": 1e999, "row": ""}\n', b"{}\n"])
def test_what_is_no_row_is_removed(line: bytes, path: Path) -> None:
    before = path.read_bytes()
    path.write_bytes(before + line)
    forget_later(path, 8)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("resumed_at", "kept"), [(9, [4, 8]), (8, [4, 8]), (7, [4]), (0, []), (None, None)])
def test_without_the_option_too_later_answers_are_forgotten(
    resumed_at: int | None, kept: list[int] | None, path: Path
) -> None:
    config = build({"model_name_or_path": "embedded", "dataset_name": "embedded", "max_steps": 1})
    assert not config.generates_answers

    def attempt(is_main: bool) -> None:
        names = dict.fromkeys(("backend", "mesh"))
        ranks, run = SimpleNamespace(is_main=is_main), RunFolder(path.parent)
        context = cast(Any, SimpleNamespace(config=config, ranks=ranks, run=run, **names))
        folder = None if resumed_at is None else path.parent
        assert build_answers(context, None, None, cast(Any, SimpleNamespace(step=resumed_at)), folder) is None

    attempt(is_main=False)
    assert steps(path) == [4] * 3 + [8] * 3, "control: only rank 0 writes"
    attempt(is_main=True)
    assert (sorted(set(steps(path))) if path.exists() else None) == kept
    attempt(is_main=True)  # once more, whether there is a file or not
