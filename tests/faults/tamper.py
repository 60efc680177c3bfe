"""Runs cut back to an earlier step, and checkpoints whose content is changed and whose manifest says it never was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from trainers.run.folder import RunFolder, write_json
from trainers.run.manifest import read_manifest, seal, sha256

Change = Callable[[dict[str, torch.Tensor]], None]


def checkpoint(run: RunFolder, step: int) -> Path:
    return run.checkpoints / f"step-{step:08d}"


def cut(whole: RunFolder, folder: Path, step: int) -> RunFolder:
    """A copy of a run that is done, as it would stand had it been stopped right after the save of a step."""
    run = RunFolder(Path(shutil.copytree(whole.path, folder)))
    for path in run.checkpoints.glob("step-*"):
        if path.name > checkpoint(run, step).name:
            shutil.rmtree(path)
    shutil.rmtree(run.model)
    rows = [line for line in run.metrics.read_text().splitlines() if json.loads(line)["step"] <= step]
    run.metrics.write_text("".join(f"{row}\n" for row in rows))
    run.log.write_text("")
    run.write_state(id=run.id, state="stopped", cause="stopped for a test", step=step, processes=[], export_dir=None)
    return run


def reseal(folder: Path) -> None:
    """Makes the manifest say that the files are as they were written."""
    manifest = read_manifest(folder)
    for name in manifest["files"]:
        path = folder / name
        manifest["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    write_json(folder / "manifest.json", {**manifest, "seal": seal(manifest)})


def rewrite(folder: Path, change: Change) -> None:
    """Changes the tensors of a checkpoint in a way that no digest tells."""
    for path in folder.glob("rank-*.safetensors"):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
    reseal(folder)
