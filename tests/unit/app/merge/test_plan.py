"""What `tunesmith merge` refuses before it starts anything, and how it names checkpoints and bases."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from app.cli import run_verb
from app.launch import actions
from app.merge import command
from app.merge import plan as plan_module
from app.merge.command import _work_folder
from app.merge.plan import MERGE, Plan, make_plan
from tests.made_runs import add_checkpoint, made_run
from trainers.config.mistakes import ConfigError
from trainers.embedded import BASE_DIR
from trainers.run.lineage import Stage, export_record


def adapter(folder: Path, base: str = str(BASE_DIR), config: dict[str, Any] | None = None, **settings: Any) -> Path:
    folder.mkdir(parents=True)
    saved = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none", **settings}
    (folder / "adapter_config.json").write_text(json.dumps({**saved, "base_model_name_or_path": base}))
    save_file({"x": np.zeros(4, np.float32)}, folder / "adapter_model.safetensors")
    if config is not None:
        (folder / "tunesmith.json").write_text(json.dumps(export_record(config, [Stage("run", "sft", "lora")])))
    return folder


def full(folder: Path, base: str = "", value: float = 0.0) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"x": np.full(4, value, np.float32)}, folder / "model.safetensors")
    if base:
        stages = [Stage("run", "sft", "full", "data", 3, base)]
        record = export_record({"method": "full", "model_name_or_path": base}, stages)
        (folder / "tunesmith.json").write_text(json.dumps(record))
    return folder


def planned(*argv: object) -> Plan:
    arguments = [str(word) for word in argv]
    args = MERGE.read(arguments)
    assert args is not None
    return make_plan(args, arguments)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for number in (1, 2):
        adapter(tmp_path / f"a{number}")
        full(tmp_path / f"f{number}", "embedded")
    full(tmp_path / "stranger")
    return tmp_path


def refused(folders: Path, names: Sequence[str], *options: object) -> str:
    target = folders / "out"
    with pytest.raises(ConfigError) as caught:
        planned(*(folders / name for name in names), "--output_dir", target, *options)
    assert not target.exists()
    assert not (folders / ".out.merging").exists()
    return "\n".join(caught.value.lines)


ADAPTERS, FULL = ("a1", "a2"), ("f1", "f2")


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (ADAPTERS, "--method mean", "--method=mean is not a merging method; use linear, cat, svd"),
        (FULL, "--method cat", "--method=cat merges adapters only, and these are full weights; use linear, ties"),
        (("a1", "f1"), "", "adapters and full weights cannot be merged with each other: a1 (adapter), f1 (full)"),
        (("a1",), "", "there is only one model to merge"),
        ((), "", "there is no model to merge"),
        (("a1", "a1"), "", "are the same weights"),
        (ADAPTERS, "--weights 1", "--weights=1 has 1 numbers for 2 models (a1, a2)"),
        (ADAPTERS, "--weights 1,nan", "--weights=1,nan is not a list of numbers"),
        (ADAPTERS, "--weights 1,1e999", "is not a list of numbers"),
        (ADAPTERS, "--weights 0,0", "--weights=0,0 has only zeros"),
        (ADAPTERS, "--weights ''", "--weights has no value"),
        (ADAPTERS, "--method ties", "--density is missing"),
        (ADAPTERS, "--density 0.5", "--density=0.5 does not apply to method=cat"),
        (FULL, "--method dare_linear --density 0", "--density=0 is not a share"),
        (FULL, "--method ties --density 1.5", "--density=1.5 is not a share"),
        (FULL, "--method ties --density half", "--density=half is not a share"),
        (FULL, "--method ties --density 0.5 --seed 1", "--seed=1 does not apply to method=ties"),
        (FULL, "--method dare_ties --density 0.5 --seed -1", "--seed=-1 is not a valid whole number"),
        (ADAPTERS, "--rank 4", "--rank=4 does not apply to method=cat"),
        (ADAPTERS, "--method svd --rank 0", "--rank=0 is not a valid whole number"),
        (ADAPTERS, "--dtype int8", "--dtype=int8 is not a valid value; use auto, float32, bfloat16, float16"),
        (ADAPTERS, "--base embedded", "--base=embedded does not apply to adapters"),
        (ADAPTERS, "--dataset_name my.jsonl", "dataset_name has no effect without --eval"),
        (ADAPTERS, "--learning_rate 1", "learning_rate has no part in a merge"),
        (("f1", "stranger"), "--method ties --density 0.5", "stranger does not say what it was trained from"),
        (ADAPTERS, "--checkpoints last:2", "--checkpoints=last:2 with 2 models; name one run"),
        (ADAPTERS, "--eval", "dataset_name is missing: no run says which rows to evaluate"),
    ],
)
def test_an_invalid_request_is_refused_by_option_and_value(
    names: Sequence[str], options: str, message: str, folders: Path
) -> None:
    arguments = ["" if word == "''" else word for word in options.split()]
    if "--eval" in arguments:
        argv = [*(str(folders / name) for name in names), "--output_dir", str(folders / "out"), "--eval"]
        assert run_verb(["merge", *argv]) == 2
        return
    assert message in refused(folders, names, *arguments)


def test_a_valid_request_is_planned(folders: Path) -> None:
    """Control for the refusals."""
    plan = planned(folders / "a1", folders / "a2", "--output_dir", folders / "out", "--weights=-0.5,1")
    assert (plan.kind, plan.weights, plan.options["method"]) == ("adapter", [-0.5, 1.0], "cat")
    assert str(plan.base) == "embedded"
    assert planned(folders / "f1", folders / "f2", "--output_dir", folders / "out").weights == [0.5, 0.5]
    ties = ["--method", "ties", "--density", 0.5]
    plan = planned(folders / "f1", folders / "stranger", "--base", "embedded", *ties, "--output_dir", folders / "out")
    assert (plan.weights, plan.options["needs_base"]) == ([1.0, 1.0], True)
    assert planned("embedded", folders / "f1", "--output_dir", folders / "out").options["needs_base"] is False


def test_models_of_one_name_get_labels_that_differ_and_leave_other_names_alone(tmp_path: Path) -> None:
    models = [adapter(tmp_path / path) for path in ("x/a", "y/a", "z/a 2", "w/a", "v/a 3")]
    plan = planned(*models, "--output_dir", tmp_path / "out")
    assert [model.label for model in plan.models] == ["a", "a 4", "a 2", "a 5", "a 3"]


def test_models_of_different_bases_are_refused(folders: Path) -> None:
    full(folders / "other", str(full(folders / "base-2", value=1.0)))
    assert "f1 was trained from embedded, and other from" in refused(folders, ("f1", "other"))
    adapter(folders / "hub", "org/model")
    assert "a1 was trained from embedded, and hub from org/model" in refused(folders, ("a1", "hub"))
    adapter(folders / "revised", "org/model", revision="v2")
    assert "from org/model at revision v2" in refused(folders, ("hub", "revised"))
    base = str(BASE_DIR)
    adapter(folders / "scaled", base, {"method": "lora", "model_name_or_path": "embedded", "rope_scaling": "linear"})
    assert "scaled with rope_scaling=linear: their bases differ" in refused(folders, ("a1", "scaled"))
    adapter(folders / "four-bit", base, {"method": "qlora", "model_name_or_path": "embedded"})
    assert "method=lora, and four-bit with method=qlora" in refused(folders, ("a1", "four-bit"))


def test_a_copied_base_is_the_same_base_until_its_weights_change(folders: Path) -> None:
    first, copied = full(folders / "base-1", value=1.0), folders / "base-2"
    shutil.copytree(first, copied)
    full(folders / "one", str(first))
    full(folders / "two", str(copied))
    planned(folders / "one", folders / "two", "--output_dir", folders / "out")
    save_file({"x": np.full(4, 2.0, np.float32)}, copied / "model.safetensors")
    assert "whose weights are not known to be the same" in refused(folders, ("one", "two"))


def test_checkpoints_are_named_by_number_step_or_all(tmp_path: Path) -> None:
    run = made_run(tmp_path / "runs", "one")
    for step in (10, 20, 30):
        add_checkpoint(run, step)
    names = {
        "last:2": ["step-00000020", "step-00000030"],
        "all": ["step-00000010", "step-00000020", "step-00000030"],
        "10, step-00000030": ["step-00000010", "step-00000030"],
    }
    for text, wanted in names.items():
        assert plan_module._checkpoints(text, run) == wanted
    for text in ("last:4", "last:1", "last:0", "last:-1", "10", "10,40", "", "last:x", "10,10", "\u0661\u0660,20"):
        with pytest.raises(ConfigError, match="--checkpoints"):
            plan_module._checkpoints(text, run)


def test_a_folder_with_files_or_without_room_is_not_written(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folders / "used").mkdir()
    (folders / "used" / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"output_dir=.*used holds other files"):
        planned(folders / "a1", folders / "a2", "--output_dir", folders / "used")
    monkeypatch.setattr(plan_module, "free_bytes", lambda _: 1000)
    assert "this merge needs up to" in refused(folders, FULL)


def test_the_export_of_a_checkpoint_holds_the_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If only the merge is killed, it would otherwise write into the folder of the next one."""
    run = made_run(tmp_path / "runs", "one")
    for step in (10, 20):
        add_checkpoint(run, step)
    plan = planned("one", "--checkpoints", "all", "--runs_dir", tmp_path / "runs", "--output_dir", tmp_path / "out")
    inherited = list[int]()

    def run_program(*_: Any, pass_fds: Sequence[int] = (), **__: Any) -> tuple[int, str, str]:
        lock = os.stat(tmp_path / ".out.merging" / "lock")
        inherited.extend(number for number in pass_fds if os.fstat(number).st_ino == lock.st_ino)
        return 1, "", "it ends here"

    monkeypatch.setattr(actions, "run_program", run_program)
    with pytest.raises(actions.ExportFailed, match="it ends here"):
        command._merge(plan, quiet=True)
    assert len(inherited) == 1
    assert not list(tmp_path.glob(".out*"))


def test_two_merges_into_one_folder_do_not_meet(tmp_path: Path) -> None:
    """The second is refused; what a killed one has left is removed by the next."""
    target = tmp_path / "out"
    with _work_folder(target) as (work, lock):
        (work / "result").mkdir()
        with pytest.raises(ConfigError, match="is being written by another merge"), _work_folder(target):
            pass
        assert (work / "result").is_dir()
        child = os.dup(lock)  # as the program that merges has it
    assert not work.exists()
    work.mkdir()
    (work / "result").mkdir()
    (work / "lock").touch()
    os.close(child)
    with _work_folder(target) as (work, _):
        assert [path.name for path in work.iterdir()] == ["lock"]
