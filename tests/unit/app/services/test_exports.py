"""Exports that a run's page starts: what is refused, and what is told of one that runs or has ended."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from app.launch import actions
from app.launch.actions import ExportRequest
from app.runs.exports import EXPORTS, ExportFolder
from app.services.exports import newest, start, stop
from tests.made_runs import add_checkpoint, made_run
from trainers.config.gguf_types import LLAMA_CPP, offered_types
from trainers.config.mistakes import ConfigError
from trainers.run.folder import Process, RunFolder
from ui.pages.run_export import export_part

CHECKPOINT = "step-00000020"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = made_run(tmp_path / "runs", "first", config={"method": "lora"})
    add_checkpoint(made, 20)
    made.record.begin()
    return made


def work(run: RunFolder, printed: str, **note: Any) -> ExportFolder:
    """The folder of an export."""
    folder = ExportFolder(run.path / "exports" / str(len(EXPORTS.of(run)) + 1))
    folder.path.mkdir(parents=True)
    folder.output.write_text(printed, encoding="utf-8")
    own = {"target": str(run.path / "export-merged"), "options": ["--merged"], "host": os.uname().nodename}
    folder.write_note({**own, "started_at": "2026-11-28T10:00:00+00:00", **note})
    return folder


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (ExportRequest("step-00000099"), "checkpoint='step-00000099' is not in this run"),
        (ExportRequest("../../etc"), "is not in this run"), (ExportRequest(None), "is not in this run"),
        (ExportRequest(["x"]), "is not in this run"),
        (ExportRequest(CHECKPOINT, averaged=True), "keeps no moving average"),
        (ExportRequest(CHECKPOINT, merged=True, gguf="f16"), "gguf=f16 is not offered here"),
        (ExportRequest(CHECKPOINT, merged=True, gguf="--output"), "is not offered here"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    run: RunFolder, wanted: ExportRequest, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        start(run, wanted)
    assert not (run.path / "exports").exists()


def test_an_adapter_is_merged_for_gguf_files(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The types that are offered depend on what is installed; without the converter there are none."""
    assert offered_types()[0] == []
    assert "git clone https://github.com/ggml-org/llama.cpp" in offered_types()[1]
    (tmp_path / "convert_hf_to_gguf.py").touch()
    (tmp_path / "sentencepiece").mkdir()
    (tmp_path / "sentencepiece" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(LLAMA_CPP, str(tmp_path))
    assert {"f16", "bf16", "f32"} <= {*offered_types()[0]}
    with pytest.raises(ConfigError, match="add --merged"):
        start(run, ExportRequest(CHECKPOINT, gguf="f16"))
    monkeypatch.setenv(LLAMA_CPP, str(tmp_path / "runs"))
    assert offered_types()[0] == [], "that folder has no converter"


def test_one_at_a_time_and_nothing_else_meanwhile(run: RunFolder) -> None:
    folder = work(run, "", processes=[Process.of("export").as_json()])
    with EXPORTS.lock(run):
        entry = newest(run)
        assert entry is not None
        assert (entry["state"], entry["doing"], entry["stopping"]) == ("running", "reading the checkpoint", False)
        for change in (lambda: start(run, ExportRequest(CHECKPOINT)), lambda: actions.rename(run, "other"),
                       lambda: actions.delete(run)):  # fmt: skip
            with pytest.raises(ConfigError, match="an export of run first is running"):
                change()
        unfinished = run.path / ".export-merged.0123456789abcdef"
        unfinished.mkdir()
        (unfinished / "model.safetensors").write_bytes(b"0" * 2_000_000)
        assert "writing the weights, 2 MB so far" in export_part(run)
        (unfinished / "tokenizer_config.json").touch()
        assert "loading it back" in export_part(run)
        (unfinished / "model-F16.gguf").touch()
        assert "writing GGUF files: model-F16.gguf" in export_part(run)
    assert folder.path.exists()
    with pytest.raises(ConfigError, match="no export of run first is running"):
        stop(run)


@pytest.mark.parametrize(
    ("printed", "note", "state", "shown"),
    [
        ("its loss is the same\nTARGET\n", {}, "done", "Its loss is the same"),
        ("error: it cannot be\n", {}, "failed", "it cannot be"),
        ("", {}, "failed", "it was killed"), ("interrupted\n", {"stopped_at": "now"}, "stopped", "nothing of it"),
        ("its loss is the same\nTARGET\n", {"stopped_at": "now"}, "done", "Its loss is the same"),
        ("\x1b[31m<img src=x>\n", {}, "failed", "&lt;img src=x&gt;"),
        ("TARGET", {"target": 5}, "failed", "TARGET"),
    ],
)  # fmt: skip
def test_how_one_has_ended(run: RunFolder, printed: str, note: dict[str, Any], state: str, shown: str) -> None:
    work(run, printed.replace("TARGET", str(run.path / "export-merged")), **note)
    (run.path / "export-merged").mkdir()
    entry, html = newest(run), str(export_part(run))
    assert entry is not None
    assert entry["state"] == state
    assert shown.replace("TARGET", str(run.path)) in html
    assert "\x1b" not in html
    assert ("Open it in Chat" in html) == (state == "done")
    assert "<!--stop-->" not in html


def test_one_is_found_where_the_run_is_now(run: RunFolder) -> None:
    """A rename moves its folder; the path that it printed is another run's soon."""
    work(run, f"{run.path / 'export-merged'}\n")
    run.record.enter(["export-merged/", "exports/"])
    (run.path / "export-merged").mkdir()
    old, renamed = str(run.path), actions.rename(run, "second")
    html = str(export_part(renamed))
    assert f"The model is in <code>{renamed.path / 'export-merged'}</code>" in html
    assert f"tunesmith export {renamed.path} --merged" in html
    assert old not in html
    (renamed.path / "export-merged").rmdir()
    gone = str(export_part(renamed))
    assert "which is gone" in gone
    assert "Open it in Chat" not in gone


def test_without_one_there_is_nothing_to_show(run: RunFolder) -> None:
    assert export_part(run) == ""
