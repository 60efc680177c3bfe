"""Checkpoints: save, verify, publish, prune, load. Safetensors and JSON only; no pickle is written or read.

A checkpoint is written beside its final name, hashed, and renamed when it is whole; only then are older ones pruned.
Tensors are keyed by the names that transformers and peft give them, so that any layout can read them.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import set_seed

from trainers.errors import TrainingError
from trainers.parallel.backend import Backend, trained_names
from trainers.parallel.ranks import Ranks
from trainers.parallel.shards import WEIGHT, steps_of, wholes
from trainers.run_folder import read_json, write_json

FORMAT = 1
_STATE = "optim.state."
_BAD = (ValueError, KeyError, OSError, SafetensorError, RuntimeError)


@dataclass
class Progress:
    """What a run knows besides tensors; it is saved and comes back with a checkpoint.

    Args:
        step: optimizer steps done.
        elapsed_s: seconds of training over all attempts.
        tokens: real tokens trained on.
        best_step, best_score, best_results: the best evaluation so far.
        stale_evaluations: evaluations since the best one.
        loss_scale: state of fp16's gradient scaler.
    """

    step: int = 0
    elapsed_s: float = 0.0
    tokens: int = 0
    best_step: int | None = None
    best_score: float | None = None
    best_results: dict[str, float] = field(default_factory=dict)
    stale_evaluations: int = 0
    loss_scale: dict[str, Any] | None = None


@dataclass(frozen=True)
class Origin:
    """Where a checkpoint comes from; kept in its manifest.

    Args:
        base: digest of the frozen weights, which a checkpoint of adapters does not hold; empty without any.
    """

    layout: str
    config: dict[str, Any]
    data_fingerprint: str
    base: str = ""
    versions: dict[str, str] = field(default_factory=dict)


def kept_buffers(model: nn.Module) -> list[str]:
    """Names of the buffers that a checkpoint keeps: those of the state dict, where all weights are trained."""
    if not all(weight.requires_grad for weight in model.parameters()):
        return []
    persistent = set(model.state_dict(keep_vars=True))
    return [name for name, _ in model.named_buffers() if name in persistent]


def base_digest(model: nn.Module) -> str:
    """Digest of a sample of each frozen weight; empty where all are trained.

    Rounded to bf16, so that the same base read in another compute dtype is the same; 4-bit weights are left out, whose
    embeddings and norms tell one base from another.
    """
    digest = hashlib.sha256()
    frozen = [(name, one) for name, one in model.named_parameters() if not one.requires_grad]
    for name, weight in frozen:
        if weight.is_floating_point() and type(weight) is nn.Parameter:
            flat = weight.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // 1024)].to(torch.bfloat16)
            digest.update(f"{name} {list(weight.shape)}".encode() + some.view(torch.int16).numpy().tobytes())
    return digest.hexdigest() if frozen else ""


def saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint keeps of a model that nothing wraps: trained weights and some buffers."""
    return dict(trained_names(model)) | {name: model.get_buffer(name) for name in kept_buffers(model)}


def _random_state() -> dict[str, torch.Tensor]:
    """The generators of this rank as tensors: torch, CUDA, NumPy, Python."""
    numpy_state: Any = np.random.get_state()
    _, python_words, python_gauss = random.getstate()
    states = {
        "rng.torch": torch.get_rng_state(),
        "rng.numpy": torch.from_numpy(numpy_state[1].astype(np.int64)),
        "rng.numpy_position": torch.tensor(numpy_state[2]),
        "rng.python": torch.tensor(python_words, dtype=torch.int64),
    }
    if python_gauss is not None:
        states["rng.python_gauss"] = torch.tensor(python_gauss, dtype=torch.float64)
    if torch.cuda.is_available():
        states["rng.cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_state(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["rng.torch"])
    words = states["rng.numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, int(states["rng.numpy_position"]), 0, 0.0))
    gauss = float(states["rng.python_gauss"]) if "rng.python_gauss" in states else None
    random.setstate((3, tuple(int(word) for word in states["rng.python"]), gauss))
    if "rng.cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["rng.cuda"])


def sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Makes a file's or folder's content survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _set_aside(folder: Path, why: str) -> Path:
    """Renames a checkpoint so that nothing takes it for one; the next save removes it."""
    aside = folder.with_name(f"{why}-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def _seal(manifest: dict[str, Any]) -> str:
    """Digest of a manifest without its own seal, so that a flipped bit in it is seen too."""
    body = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        ValueError: when it is missing, damaged or of another format.
    """
    manifest = read_json(folder / "manifest.json")
    if manifest is None:
        raise ValueError("its manifest is missing or no JSON")
    if manifest.get("seal") != _seal(manifest):
        raise ValueError("its manifest was changed after it was written")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"its format is {manifest.get('format')}, this version reads {FORMAT}")
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is as it was written.

    Raises:
        ValueError: naming the first file that is missing, of another size, or of another content.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise ValueError(f"{name} has {path.stat().st_size} bytes, {expected['bytes']} were written")
        if sha256(path) != expected["sha256"]:
            raise ValueError(f"{name} was changed after it was written")
    return manifest


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: `checkpoints/` of the run folder.
        ranks: the processes that save together.
        origin: kept in every manifest.
        limit: how many to keep besides the best one.
        attempt: number of this start of the run; part of the temporary name.
    """

    def __init__(self, folder: Path, ranks: Ranks, origin: Origin, limit: int = 2, attempt: int = 0):
        self.folder, self.ranks, self.origin = folder, ranks, origin
        self.limit, self.attempt = max(limit, 2), attempt

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.folder / f"step-{step:08d}"

    def published(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return sorted(path for path in self.folder.glob("step-" + "[0-9]" * 8) if path.is_dir())

    def save(self, backend: Backend, buffers: dict[str, torch.Tensor], progress: Progress) -> Path:
        """Writes and publishes the checkpoint of `progress.step`; returns its folder. Collective.

        Args:
            backend: holds weights and optimizer state, in whatever layout.
            buffers: those that `kept_buffers` names, the same on every rank.
            progress: what is saved beside the tensors.

        Raises:
            TrainingError: on every rank when any could not write; the checkpoints before it stand.
        """
        final = self.path(progress.step)
        temporary = self.folder / f"{final.name}.tmp-{self.attempt}"
        error: Exception | None = None
        entry: dict[str, Any] = {}
        mine = self._share(backend, buffers)
        try:
            self._check_room(mine)
            temporary.mkdir(parents=True, exist_ok=True)
            entry = self._write_share(temporary, mine)
        except Exception as problem:  # whatever it is, the other ranks must hear of it before this one raises
            error = problem
        try:
            self.ranks.agree(error, f"saving the checkpoint of step {progress.step}")
        except TrainingError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        entries = self.ranks.gather(entry)
        error = None
        if self.ranks.is_main:
            try:
                self._publish(temporary, final, progress, entries)
            except OSError as problem:
                error = problem
        self.ranks.agree(error, f"publishing the checkpoint of step {progress.step}")
        return final

    def _share(self, backend: Backend, buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The whole tensors that fall to this rank, on the CPU, and its own random state. Collective."""
        mine: dict[str, torch.Tensor] = {}
        shards = backend.shards()
        steps = steps_of(shards, self.ranks)
        for name, key, owner, whole in wholes(shards, steps, self.ranks):
            if owner == self.ranks.rank and whole is not None:
                full_name = f"model.{name}" if key == WEIGHT else f"optim.state.{name}.{key}"
                mine[full_name] = whole.detach().cpu().contiguous()
        if self.ranks.is_main:
            mine |= {f"optim.state.{name}.step": torch.tensor(step) for name, step in steps.items()}
            mine |= {f"model.{name}": buffer.detach().cpu().contiguous() for name, buffer in buffers.items()}
        return mine | {f"{name}.{self.ranks.rank}": state for name, state in _random_state().items()}

    def _check_room(self, tensors: dict[str, torch.Tensor]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) * self.ranks.world
        free = shutil.disk_usage(self.folder).free
        if free < needed * 1.01 + 2**20:
            raise OSError(
                f"{self.folder} has {free:,} bytes free, a checkpoint needs {needed:,}; "
                "make room, then resume from the last one"
            )

    def _write_share(self, temporary: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Writes one file and tells what is in it: name, bytes, sha256, tensors."""
        path = temporary / f"rank-{self.ranks.rank:05d}.safetensors"
        save_file(tensors, path)
        sync(path)
        shapes = {name: {"shape": list(one.shape), "dtype": str(one.dtype)[6:]} for name, one in tensors.items()}
        return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path), "tensors": shapes}

    def _publish(self, temporary: Path, final: Path, progress: Progress, entries: list[dict[str, Any]]) -> None:
        manifest = {
            "format": FORMAT,
            "step": progress.step,
            "world": self.ranks.world,
            "progress": asdict(progress),
            **asdict(self.origin),
            "files": {entry["file"]: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for entry in entries},
            "tensors": {
                name: {**shape, "file": entry["file"]} for entry in entries for name, shape in entry["tensors"].items()
            },
        }
        write_json(temporary / "manifest.json", {**manifest, "seal": _seal(manifest)})
        sync(temporary)
        if final.exists():
            _set_aside(final, "later")  # computed again after a resume from an older one
        os.replace(temporary, final)
        sync(self.folder)
        self._prune(progress)

    def _prune(self, progress: Progress) -> None:
        best = self.path(progress.best_step) if progress.best_step is not None else None
        old = [path for path in self.published() if path != best][: -self.limit]
        aside = [path for name in ("step-*.tmp-*", "later-step-*") for path in self.folder.glob(name)]
        for path in [*old, *aside]:
            shutil.rmtree(path, ignore_errors=True)

    def newest(self) -> Path | None:
        """The newest checkpoint that verifies; bad ones are set aside by name and reported. Collective."""
        found = None
        if self.ranks.is_main:
            for path in reversed(self.published()):
                try:
                    verify(path)
                    found = path
                    break
                except (ValueError, OSError) as problem:
                    aside = _set_aside(path, "bad")
                    print(f"checkpoint {path.name} is bad: {problem}; set aside as {aside.name}", flush=True)
        found = self.ranks.broadcast(None if found is None else str(found))
        return None if found is None else Path(found)

    def load(self, folder: Path, model: nn.Module) -> Progress:
        """Puts the weights of a checkpoint into a model that nothing wraps yet. Collective.

        Raises:
            TrainingError: on every rank, when the checkpoint is bad or belongs to another model.
        """
        error, progress = None, Progress()
        try:
            manifest = verify(folder) if self.ranks.is_main else read_manifest(folder)
            self._refuse_other_data(manifest)
            self._refuse_other_base(manifest)
            load_weights(folder, model)
            progress = Progress(**manifest["progress"])
        except _BAD as problem:
            error = problem
        self.ranks.agree(error, f"loading {folder}")
        return progress

    def restore(self, folder: Path, backend: Backend, seed: int) -> None:
        """Puts its optimizer state and random generators into a run whose weights `load` has set. Collective.

        Raises:
            TrainingError: on every rank, when the checkpoint's optimizer state is not this optimizer's.
        """
        error = None
        try:
            manifest = read_manifest(folder)
            _load_optimizer(folder, manifest, backend)
            self._load_random_state(folder, manifest, seed)
        except _BAD as problem:
            error = problem
        self.ranks.agree(error, f"loading {folder}")
        if self.ranks.is_main:
            # They are of another future than the one that begins here, and `newest` must not find them.
            for path in [path for path in self.published() if path.name > self.path(manifest["step"]).name]:
                _set_aside(path, "later")

    def intact(self, step: int) -> bool:
        """Whether the checkpoint of a step is here and as it was written. Collective."""
        problem = None
        if self.ranks.is_main:
            try:
                verify(self.path(step))
            except (ValueError, OSError) as error:
                problem = str(error)
                print(f"checkpoint {self.path(step).name} is bad: {problem}", flush=True)
        return self.ranks.broadcast(problem) is None

    def _refuse_other_data(self, manifest: dict[str, Any]) -> None:
        if manifest["data_fingerprint"] != self.origin.data_fingerprint:
            raise ValueError(
                "the data, its tokenizer or its options changed since it was saved, so its steps would be others; "
                "restore them, or start a new run"
            )

    def _refuse_other_base(self, manifest: dict[str, Any]) -> None:
        if manifest["base"] != self.origin.base:
            raise ValueError(
                "the base model's weights are not those that its adapters were trained on; restore them, "
                "or start a new run"
            )

    def differences(self, folder: Path) -> list[str]:
        """What the config says now beside what it said when a checkpoint was saved, a line per option."""
        then, now = read_manifest(folder)["config"], self.origin.config
        names = [name for name in now if name in then and then[name] != now[name]]
        return [f"{name}={now[name]}, and {then[name]} when the checkpoint was saved" for name in names]

    def _load_random_state(self, folder: Path, manifest: dict[str, Any], seed: int) -> None:
        """The saved generators on the same number of ranks; derived from seed and step on another."""
        if manifest["world"] != self.ranks.world:
            set_seed((seed + 1_000_003 * (manifest["step"] + 1) + self.ranks.rank) % 2**32)
            return
        ending = f".{self.ranks.rank}"
        states = {f"rng.{name}": tensor for name, tensor in _read(folder, "rng.")}
        _set_random_state({name.removesuffix(ending): one for name, one in states.items() if name.endswith(ending)})


def _read(folder: Path, prefix: str, ending: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor whose name starts with `prefix` and ends with `ending`, both taken off."""
    for file in sorted(read_manifest(folder)["files"]):
        with safe_open(folder / file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a safetensors handle is no dict
                if name.startswith(prefix) and name.endswith(ending):
                    yield name.removeprefix(prefix).removesuffix(ending), tensors.get_tensor(name)


def _load_optimizer(folder: Path, manifest: dict[str, Any], backend: Backend) -> None:
    """Gives each weight of this rank its run of the optimizer state."""
    state = {name.removeprefix(_STATE).rpartition(".")[::2] for name in manifest["tensors"] if name.startswith(_STATE)}
    steps = {name: float(value) for name, value in _read(folder, _STATE, ".step")}
    if not steps:
        return
    backend.make_state(sorted({key for _, key in state} - {"step"}), steps)
    shards = {shard.name: shard for shard in backend.shards()}
    for name, tensor in _read(folder, _STATE):
        weight, _, key = name.rpartition(".")
        if key != "step" and shards[weight].elements:
            shards[weight].fill(key, tensor)
    backend.put_back(list(shards.values()))


def load_weights(folder: Path, model: nn.Module) -> None:
    """Copies the weights of a checkpoint into a model that has the same ones.

    Raises:
        ValueError: naming a weight that only one of the two has, or whose shape differs.
    """
    wanted = saved_tensors(model)
    with torch.no_grad():
        for name, tensor in _read(folder, "model."):
            if name not in wanted:
                raise ValueError(f"{name} is in the checkpoint and not in the model; was it made by another config?")
            target = wanted.pop(name)
            if target.shape != tensor.shape:
                raise ValueError(f"{name} is {list(tensor.shape)} there and {list(target.shape)} here")
            target.copy_(tensor)
    if wanted:
        raise ValueError(f"{len(wanted)} weights are not in the checkpoint, among them {next(iter(wanted))}")
