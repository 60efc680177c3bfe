"""Promises P0, P2, P4 and bit-exact resume for `single` and `ddp`, and controls that show each test can fail."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.launching import Finished
from tests.parity import plain
from tests.parity.checks import check_export, equal_after_resume, reference, resumed, same_bits
from tests.parity.runs import HALF, STEPS, config, curve, mostly_long, run
from trainers.run.folder import write_json
from trainers.run.manifest import read_manifest, seal, sha256

METHODS = ("lora", "full")
PACKING = (True, False)


BOTH = [(1, "lora", True), (2, "full", True)]
EACH = [(processes, method, packing) for processes in (1, 2) for method in METHODS for packing in PACKING]


@pytest.mark.parametrize(("processes", "method", "packing"), mostly_long(EACH, EACH, BOTH))
def test_p2_equals_a_plain_page_of_pytorch(processes: int, method: str, packing: bool) -> None:
    assert curve(run(processes, method, packing)).agrees(reference(method, packing))


@pytest.mark.parametrize(("method", "packing"), mostly_long([("full", True), ("lora", False)], []))
def test_p2_on_four_processes(method: str, packing: bool) -> None:
    assert curve(run(4, method, packing)).agrees(reference(method, packing))


@pytest.mark.parametrize(("method", "packing"), [("full", False), ("lora", True)])
def test_evaluation_is_exact_on_any_number_of_ranks(method: str, packing: bool) -> None:
    """37 rows on 1 and 2 ranks, in batches of 4: no row is lost or counted twice in the remainder."""
    losses = [run(processes, method, packing).series("eval_loss")[-1] for processes in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("method", mostly_long(METHODS, []))
def test_accumulation_changes_nothing(method: str) -> None:
    """Accumulation 4, 2 and 1 on one process."""
    for size in (4, 8):
        other = run(1, method, False, per_device_train_batch_size=size)
        assert curve(other).agrees(reference(method, False))


@pytest.mark.parametrize("method", mostly_long(METHODS, ["full"]))
def test_ddp_2_equals_accumulation_2_bit_for_bit(method: str) -> None:
    assert same_bits(
        run(1, method, True, global_batch_size=4, per_device_train_batch_size=2),
        run(2, method, True, global_batch_size=4, per_device_train_batch_size=2),
    )


@pytest.mark.quick
@pytest.mark.parametrize(("processes", "method"), [(1, "lora"), (2, "full")])
def test_p0_rerun_by_hand_is_the_same_bit_for_bit(processes: int, method: str) -> None:
    assert same_bits(run(processes, method, True), run(processes, method, True, again=1))


def imported_by_first_step(finished: Finished) -> set[str]:
    """Packages that rank 0 has imported when its first step ends."""
    text, ended, _ = finished.run.log.read_text().partition("first step after ")
    assert ended
    return set(re.findall(r"\[rank 0\] import time:.*\| +(\w+)$", text, re.MULTILINE))


@pytest.mark.quick
def test_a_start_imports_only_what_it_uses() -> None:
    """Users wait for it at each start. Control: a LoRA fine-tune imports PEFT, and PEFT bitsandbytes."""
    full, lora = (imported_by_first_step(run(*which, True, again=1)) for which in ((2, "full"), (1, "lora")))
    assert {"torch", "transformers"} <= full
    assert {"peft", "bitsandbytes"} <= lora
    assert not full & {"peft", "bitsandbytes", "deepspeed", "datasets", "pandas", "pyarrow", "networkx", "tensorboard"}


@pytest.mark.quick
def test_p0_would_see_another_seed() -> None:
    """Control: another seed is another run."""
    assert not same_bits(run(1, "lora", True), run(1, "lora", True, seed=7))


@pytest.mark.parametrize(("processes", "method"), [(1, "full"), (2, "lora")])
def test_resume_is_bit_exact(processes: int, method: str, tmp_path: Path) -> None:
    undisturbed = run(processes, method, True)
    assert [path.name for path in undisturbed.checkpoints] == [f"step-{step:08d}" for step in (HALF, STEPS)]
    again = resumed(tmp_path / "again", processes, method, undisturbed.checkpoints[0])
    assert equal_after_resume(undisturbed, again)


def test_resume_is_bit_exact_on_four_processes(tmp_path: Path) -> None:
    """DDP groups gradients anew after its first step; on more than two ranks the groups decide how they are summed."""
    undisturbed = run(4, "full", True)
    again = resumed(tmp_path / "again", 4, "full", undisturbed.checkpoints[0])
    assert equal_after_resume(undisturbed, again)


def test_resume_without_optimizer_state_would_be_seen(tmp_path: Path) -> None:
    """Control: the same checkpoint with Adam's second moments set to zero resumes to something else."""
    undisturbed = run(1, "full", True)
    damaged = tmp_path / f"step-{HALF:08d}"
    shutil.copytree(undisturbed.checkpoints[0], damaged)
    (file,) = damaged.glob("*.safetensors")
    tensors = load_file(file)
    save_file({name: one * 0 if name.endswith("exp_avg_sq") else one for name, one in tensors.items()}, file)
    manifest = read_manifest(damaged)
    manifest["files"][file.name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    write_json(damaged / "manifest.json", {**manifest, "seal": seal(manifest)})
    again = resumed(tmp_path / "again", 1, "full", damaged)
    assert not equal_after_resume(undisturbed, again)


EXPORTS = [(processes, method, packing) for processes, packing in ((1, False), (2, True)) for method in METHODS]


@pytest.mark.parametrize(("processes", "method", "packing"), mostly_long(EXPORTS, EXPORTS, [(2, "full", True)]))
def test_p4_plain_libraries_load_the_export_and_give_the_trainers_loss(
    processes: int, method: str, packing: bool
) -> None:
    check_export(run(processes, method, packing), method, packing)


@pytest.mark.parametrize("control", ["mean of means", "one sample dropped", "other seed", "optimizer state missing"])
def test_what_is_wrong_does_not_agree(control: str) -> None:
    """Controls of P2: each classic fault leaves the tolerance that the strategies keep."""
    right = config("full", False)
    wrong = {
        "mean of means": lambda: plain.train(right, mean_of_means=True),
        "one sample dropped": lambda: plain.train(right, keep=lambda rows: rows[:-1]),
        "other seed": lambda: plain.train(config("full", False, seed=7)),
        "optimizer state missing": lambda: plain.train(right, forget_optimizer=True),
    }[control]()
    assert not wrong.agrees(reference("full", False))
