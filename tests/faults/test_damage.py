"""Checkpoints that were damaged at any place, and hostile ones: never loaded in silence, and nothing in them runs."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.detached import ended, gone, saved, tunesmith
from tests.faults.conftest import Note, Undisturbed
from tests.faults.oracle import INTERVAL, clean, exact, told
from tests.faults.tamper import checkpoint, cut, reseal
from trainers.checkpoint.checkpoint import Checkpoints
from trainers.parallel.ranks import Ranks
from trainers.run.folder import RunFolder
from trainers.run.manifest import Origin, verify

AT = 2 * INTERVAL
FILES = ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
EVERY_LOADER = [
    "pytorch_model.bin", "model.bin", "adapter_model.bin", ".metadata", "optimizer.pt", "optimizer.bin",
    "scheduler.bin", "rng_state.pth", "rng_state_0.pth", "random_states_0.pkl", "custom_checkpoint_0.pkl",
    "training_args.bin", "__0_0.distcp", "mp_rank_00_model_states.pt", "rank-00002.safetensors",
]  # fmt: skip
"""Names under which torch, accelerate, transformers, peft and DeepSpeed would look for a pickle."""


def flip(content: bytearray, chance: random.Random) -> bytearray:
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return content


def truncate(content: bytearray, chance: random.Random) -> bytearray:
    return content[: chance.randrange(len(content))]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", [flip, truncate])
def test_damage_at_any_place_is_named_and_the_checkpoint_before_is_used(
    file: str,
    damage: Callable[[bytearray, random.Random], bytearray],
    home: Path,
    undisturbed: Undisturbed,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = cut(undisturbed("ddp"), home / "runs" / "mine", AT)
    kept = Checkpoints(run.checkpoints, Ranks(torch.device("cpu")), Origin("ddp", {}, ""))
    whole, chance = (checkpoint(run, AT) / file).read_bytes(), random.Random(file)
    assert kept.newest() == checkpoint(run, AT), "control: it is whole"
    for _ in range(25):
        (checkpoint(run, AT) / file).write_bytes(damage(bytearray(whole), chance))
        capsys.readouterr()
        assert kept.newest() == checkpoint(run, INTERVAL)
        said = capsys.readouterr().out
        assert f"{checkpoint(run, AT).name} is bad: " in said
        assert ("manifest" if file.startswith("manifest") else file) in said
        (run.checkpoints / f"bad-{checkpoint(run, AT).name}").rename(checkpoint(run, AT))
        (checkpoint(run, AT) / file).write_bytes(whole)


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, proof: Path):
        self.proof = proof

    def __reduce__(self) -> Any:
        return open, (str(self.proof), "w")


@pytest.fixture
def payload(home: Path) -> bytes:
    """A pickle; once it was loaded, `home/proof` is there. Control: plain loaders do load it."""
    proof = home / "proof"
    content = pickle.dumps(Payload(proof))
    pickle.loads(content).close()  # noqa: S301 - that is what it is for
    assert proof.exists()
    proof.unlink()
    torch.save(Payload(proof), home / "saved")
    torch.load(home / "saved", weights_only=False).close()
    assert proof.exists()
    proof.unlink()
    return content


def resumed(run: RunFolder, home: Path) -> str:
    assert tunesmith("resume", "mine", "--detach", home=home).returncode == 0
    state = str(ended(run)["state"])
    gone(run)
    return state


def test_nothing_in_a_hostile_checkpoint_runs(
    payload: bytes, home: Path, undisturbed: Undisturbed, noted: Note
) -> None:
    whole, fault = undisturbed("ddp"), noted("hostile checkpoint", "ddp")
    run = cut(whole, home / "runs" / "mine", AT)
    for name in EVERY_LOADER:
        (checkpoint(run, AT) / name).write_bytes(payload if name.endswith("pkl") else (home / "saved").read_bytes())
    file, before = checkpoint(run, AT) / FILES[2], (checkpoint(run, AT) / FILES[2]).read_bytes()
    for content in (payload, (home / "saved").read_bytes()):
        file.write_bytes(content)
        reseal(checkpoint(run, AT))
        verify(checkpoint(run, AT))  # its manifest does not give it away
        with pytest.raises(Exception, match="header"), safe_open(file, framework="pt"):
            pass
    fault.at()
    assert resumed(run, home) == "failed"
    assert not (home / "proof").exists()
    assert f"loading {checkpoint(run, AT)} failed" in told(run)
    clean(run)
    assert saved(run) == AT, "what stands is left for its owner to look at"
    file.write_bytes(before)
    reseal(checkpoint(run, AT))
    assert resumed(run, home) == "done"
    exact(run, whole, replays=0)
    assert not (home / "proof").exists()
    fault.harmless()
