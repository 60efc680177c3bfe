"""Promises P0, P2, P4 and bit-exact resume for `single` and `ddp`, and controls that show each test can fail."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.launching import Finished, launch_well
from tests.parity import plain
from tests.parity.runs import STEPS, config, curve, options, run
from trainers.checkpoint import _seal, read_manifest, saved_tensors, sha256
from trainers.data.prepare import prepare
from trainers.run_folder import write_json

METHODS = ("lora", "full")
PACKING = (True, False)
plain_curves: dict[tuple[str, bool], plain.Curve] = {}


def reference(method: str, packing: bool) -> plain.Curve:
    if (method, packing) not in plain_curves:
        plain_curves[method, packing] = plain.train(config(method, packing))
    return plain_curves[method, packing]


def weights(finished: Finished) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in finished.run.model.glob("*.safetensors"):
        tensors |= load_file(file)
    assert tensors
    return tensors


def same_bits(one: Finished, other: Finished) -> bool:
    """Losses, gradient norms, rates and exported weights, bit for bit."""
    series = all(one.series(key) == other.series(key) for key in ("loss", "grad_norm", "learning_rate"))
    mine, theirs = weights(one), weights(other)
    return series and set(mine) == set(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("packing", PACKING)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("processes", [1, 2])
def test_p2_equals_a_plain_page_of_pytorch(processes: int, method: str, packing: bool) -> None:
    assert curve(run(processes, method, packing)).agrees(reference(method, packing))


@pytest.mark.parametrize(("method", "packing"), [("full", True), ("lora", False)])
def test_p2_on_four_processes(method: str, packing: bool) -> None:
    assert curve(run(4, method, packing)).agrees(reference(method, packing))


@pytest.mark.parametrize(("method", "packing"), [("full", False), ("lora", True)])
def test_evaluation_is_exact_on_any_number_of_ranks(method: str, packing: bool) -> None:
    """37 rows on 1 and 2 ranks, in batches of 4: no row is lost or counted twice in the remainder."""
    losses = [run(processes, method, packing).series("eval_loss")[-1] for processes in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_accumulation_changes_nothing(method: str) -> None:
    """Accumulation 4, 2 and 1 on one process."""
    for size in (4, 8):
        other = run(1, method, False, per_device_train_batch_size=size)
        assert curve(other).agrees(reference(method, False))


@pytest.mark.parametrize("method", METHODS)
def test_ddp_2_equals_accumulation_2_bit_for_bit(method: str) -> None:
    assert same_bits(
        run(1, method, True, global_batch_size=4, per_device_train_batch_size=2),
        run(2, method, True, global_batch_size=4, per_device_train_batch_size=2),
    )


@pytest.mark.parametrize(("processes", "method"), [(1, "lora"), (2, "full")])
def test_p0_rerun_is_the_same_bit_for_bit(processes: int, method: str) -> None:
    assert same_bits(run(processes, method, True), run(processes, method, True, again=1))


def test_p0_would_see_another_seed() -> None:
    """Control: another seed is another run."""
    assert not same_bits(run(1, "lora", True), run(1, "lora", True, seed=7))


def resumed(finished: Finished, folder: Path, processes: int, method: str, checkpoint: Path) -> Finished:
    more = {"resume_from_checkpoint": checkpoint}
    return launch_well(folder, processes, options(method, True) | more)


def equal_after_resume(undisturbed: Finished, again: Finished) -> bool:
    steps = [row["step"] for row in again.rows()]
    assert steps == list(range(11, STEPS + 1))
    tail = all(undisturbed.series(key)[10:] == again.series(key) for key in ("loss", "grad_norm", "learning_rate"))
    mine, theirs = weights(undisturbed), weights(again)
    return tail and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(("processes", "method"), [(1, "full"), (2, "lora")])
def test_resume_is_bit_exact(processes: int, method: str, tmp_path: Path) -> None:
    undisturbed = run(processes, method, True)
    assert [path.name for path in undisturbed.checkpoints] == ["step-00000010", "step-00000020"]
    again = resumed(undisturbed, tmp_path / "again", processes, method, undisturbed.checkpoints[0])
    assert equal_after_resume(undisturbed, again)


def test_resume_without_optimizer_state_would_be_seen(tmp_path: Path) -> None:
    """Control: the same checkpoint with Adam's second moments set to zero resumes to something else."""
    undisturbed = run(1, "full", True)
    damaged = tmp_path / "step-00000010"
    shutil.copytree(undisturbed.checkpoints[0], damaged)
    (file,) = damaged.glob("*.safetensors")
    tensors = load_file(file)
    save_file({name: one * 0 if name.endswith("exp_avg_sq") else one for name, one in tensors.items()}, file)
    manifest = read_manifest(damaged)
    manifest["files"][file.name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    write_json(damaged / "manifest.json", {**manifest, "seal": _seal(manifest)})
    again = resumed(undisturbed, tmp_path / "again", 1, "full", damaged)
    assert not equal_after_resume(undisturbed, again)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_p4_plain_libraries_load_the_export_and_give_the_trainers_loss(processes: int, method: str) -> None:
    finished = run(processes, method, False)
    loader = AutoModelForCausalLM if method == "full" else AutoPeftModelForCausalLM
    model = loader.from_pretrained(finished.run.model, attn_implementation="eager").eval()
    saved: dict[str, torch.Tensor] = {}
    for file in finished.checkpoints[-1].glob("*.safetensors"):
        saved |= {name: one for name, one in load_file(file).items() if name.startswith("model.")}
    loaded = saved_tensors(model) if method == "full" else dict(model.named_parameters())
    assert saved
    assert all(torch.equal(one, loaded[name.removeprefix("model.")]) for name, one in saved.items())
    assert stock_loss(model, method) == pytest.approx(finished.series("eval_loss")[-1], abs=1e-5)


@torch.no_grad()
def stock_loss(model: torch.nn.Module, method: str) -> float:
    """Mean loss over the trained tokens of the evaluation rows by the stock model, one document at a time."""
    documents = prepare(config(method, False), "eval")
    total = count = 0.0
    for index in range(len(documents)):
        tokens, mask = documents.document(index)
        ids, wanted = torch.from_numpy(np.array(tokens, dtype=np.int64))[None], torch.from_numpy(np.array(mask))[1:]
        logits = model(input_ids=ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits[wanted], ids[0, 1:][wanted], reduction="sum").item()
        count += int(wanted.sum())
    return total / count


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
