"""Checkpoints: save, publish, prune, load. Safetensors and JSON only; no pickle is written or read.

A checkpoint is a copy in memory first, which a thread then writes beside its final name, while training goes on; it is
renamed when it is whole, and only then are older ones pruned. Tensors are keyed by the names that transformers and peft
give them, so that any layout can read them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from accelerate.utils import set_seed
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from trainers.checkpoint.remote import Mirror
from trainers.checkpoint.rng import random_state, set_random_state
from trainers.parallel.backend import Backend, trained_names
from trainers.parallel.ranks import Ranks
from trainers.parallel.shards import WEIGHT, steps_of, wholes
from trainers.run.compatibility import FORCE, changed_options, changed_versions, refusals
from trainers.run.errors import TrainingError
from trainers.run.folder import folder_identity, write_json
from trainers.run.manifest import FORMAT, Origin, Progress, read_manifest, remove, seal, set_aside, sha256, sync, verify

_STATE = "optim.state."
_BAD = (ValueError, KeyError, OSError, SafetensorError, RuntimeError)


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


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """In memory of its own on the CPU, so that training may go on."""
    return tensor.detach().to("cpu", copy=True).contiguous()


@dataclass(frozen=True)
class Pending:
    """A checkpoint that is being written.

    Args:
        temporary: the folder that it is written to.
        progress: at its step.
        needed: bytes of all ranks' tensors.
        entry: what this rank's thread wrote, as the manifest names it.
    """

    temporary: Path
    progress: Progress
    needed: int
    entry: Future[dict[str, Any]]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was published: its step, its size, and how long the slowest rank wrote."""

    step: int
    bytes: int
    write_seconds: float

    def line(self, stalled: float) -> str:
        """What the log says; training stood still for `stalled` seconds."""
        return (
            f"saved the checkpoint of step {self.step}: {self.bytes:,} bytes in {self.write_seconds:.2f} s; "
            f"training stood still for {stalled:.2f} s"
        )

    def row(self, stalled: float) -> dict[str, Any]:
        """The row of the metrics file."""
        size = {"checkpoint_bytes": self.bytes, "checkpoint_write_s": self.write_seconds}
        return {"step": self.step, **size, "checkpoint_stall_s": stalled}


class Checkpoints:
    """The checkpoints of one run, of which at most one is being written.

    Args:
        folder: `checkpoints/` of the run folder.
        ranks: the processes that save together.
        origin: kept in every manifest.
        limit: how many to keep besides the best one.
        attempt: number of this start of the run; part of the temporary name.
        force: load although data, options or code have changed since a checkpoint was saved.

    `mirror`, on rank 0, gets a copy of each that is published.
    """

    def __init__(
        self, folder: Path, ranks: Ranks, origin: Origin, limit: int = 2, attempt: int = 0, force: bool = False
    ):
        self.folder, self.ranks, self.origin = folder, ranks, origin
        self.home = folder_identity(folder.parent)  # a run folder that is removed later is not to come back
        self.limit, self.attempt, self.force = max(limit, 2), attempt, force
        self.mirror: Mirror | None = None
        self.pending: Pending | None = None

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.folder / f"step-{step:08d}"

    def published(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return sorted(path for path in self.folder.glob("step-" + "[0-9]" * 8) if path.is_dir())

    def begin(self, backend: Backend, buffers: dict[str, torch.Tensor], progress: Progress) -> None:
        """Takes a copy of everything at `progress.step` and begins to write it, in a thread. Collective.

        Args:
            backend: holds weights and optimizer state, in whatever layout.
            buffers: those that `kept_buffers` names, the same on every rank.
            progress: what is saved beside the tensors.

        Raises:
            TrainingError: on every rank when one has no room; the checkpoints before it stand.
        """
        assert self.pending is None, "the one before is not finished"
        temporary = self.folder / f"{self.path(progress.step).name}.tmp-{self.attempt}"
        error = None
        mine = self._share(backend, buffers)
        needed = sum(self.ranks.gather(sum(one.numel() * one.element_size() for one in mine.values())))
        try:
            self._check_room(needed)
            temporary.mkdir(exist_ok=True)
        except Exception as problem:
            error = problem
        self._agree(error, temporary, f"saving the checkpoint of step {progress.step}")
        entry: Future[dict[str, Any]] = Future()
        self.pending = Pending(temporary, progress, needed, entry)
        Thread(target=self._write, args=(temporary, mine, needed, entry), name="checkpoint", daemon=True).start()

    def written(self, patience: float = 0.0) -> bool:
        """Whether this rank has nothing to write any more.

        Args:
            patience: seconds to wait for it.
        """
        return self.pending is None or not wait_for([self.pending.entry], patience).not_done

    def copied(self, patience: float = 0.0) -> bool:
        """Whether the mirror, if this rank has one, has all that was published.

        Args:
            patience: seconds to wait for it.
        """
        return self.mirror is None or self.mirror.copied(patience)

    def finish(self) -> Saved | None:
        """Publishes what was begun, once every rank has written its part; None when nothing was. Collective.

        Raises:
            TrainingError: on every rank when any could not write; the checkpoints before it stand.
        """
        if self.pending is None:
            return None
        pending, self.pending = self.pending, None
        error, entry = pending.entry.exception(), dict[str, Any]()  # waits for it
        if error is None:
            entry = pending.entry.result()
        step = pending.progress.step
        self._agree(error, pending.temporary, f"saving the checkpoint of step {step}")
        entries = self.ranks.gather(entry)
        error = None
        if self.ranks.is_main:
            try:
                self._publish(pending.temporary, self.path(step), pending.progress, entries)
            except OSError as problem:
                error = self._told(problem, pending.needed)
        self.ranks.agree(error, f"publishing the checkpoint of step {step}")
        return Saved(step, pending.needed, max(one["seconds"] for one in entries))

    def _agree(self, error: BaseException | None, temporary: Path, doing: str) -> None:
        """Raises on every rank when any failed, what was written so far removed."""
        try:
            self.ranks.agree(error, doing)
        except TrainingError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _share(self, backend: Backend, buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of the whole tensors that fall to this rank, on the CPU, and of its own random state. Collective."""
        mine: dict[str, torch.Tensor] = {}
        shards = backend.shards()
        steps = steps_of(shards, self.ranks)
        for name, key, owner, whole in wholes(shards, steps, self.ranks):
            if owner == self.ranks.rank and whole is not None:
                mine[f"model.{name}" if key == WEIGHT else f"optim.state.{name}.{key}"] = _copy(whole)
        if self.ranks.is_main:
            mine |= {f"optim.state.{name}.step": torch.tensor(step) for name, step in steps.items()}
            mine |= {f"model.{name}": _copy(buffer) for name, buffer in buffers.items()}
        return mine | {f"{name}.{self.ranks.rank}": state for name, state in random_state().items()}

    def _check_room(self, needed: int) -> None:
        if folder_identity(self.folder.parent) != self.home:
            raise FileNotFoundError(errno.ENOENT, "the run folder was removed or replaced", str(self.folder.parent))
        self.folder.mkdir(exist_ok=True)
        if shutil.disk_usage(self.folder).free < needed * 1.01 + 2**20:
            raise self._told(OSError(errno.ENOSPC, ""), needed)

    def _told(self, problem: Exception, needed: int) -> Exception:
        """A full disk in words that tell what is missing."""
        if getattr(problem, "errno", None) != errno.ENOSPC and f"os error {errno.ENOSPC}" not in str(problem):
            return problem
        free = shutil.disk_usage(self.folder).free
        return OSError(
            f"{self.folder} has {free:,} bytes free, a checkpoint needs {needed:,}; "
            "make room, then resume from the last one"
        )

    def _write(self, temporary: Path, tensors: dict[str, torch.Tensor], needed: int, entry: Future[Any]) -> None:
        """Runs in a thread of its own; whatever goes wrong, the other ranks must hear of it."""
        try:
            began = time.perf_counter()
            made = self._write_share(temporary, tensors)
            entry.set_result({**made, "seconds": time.perf_counter() - began})
        except Exception as problem:
            entry.set_exception(self._told(problem, needed))

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
        write_json(temporary / "manifest.json", {**manifest, "seal": seal(manifest)})
        sync(temporary)
        if final.exists():
            set_aside(final, "later")  # computed again after a resume from an older one
        os.replace(temporary, final)
        sync(self.folder)
        self._prune(progress)
        if self.mirror:
            self.mirror.copy(final, progress.best_step)

    def _prune(self, progress: Progress) -> None:
        best = self.path(progress.best_step) if progress.best_step is not None else None
        in_use = [best, *(self.mirror.in_use() if self.mirror else [])]
        old = [path for path in self.published() if path not in in_use][: -self.limit]
        aside = [path for name in ("step-*.tmp-*", "later-step-*") for path in self.folder.glob(name)]
        for path in [*old, *aside]:
            remove(path)

    def newest(self) -> Path | None:
        """The newest checkpoint that verifies, here or in the mirror; bad ones are set aside and reported. Collective.

        Raises:
            TrainingError: on every rank, when the mirror cannot be read.
        """
        found, error = None, None
        if self.ranks.is_main:
            for path in reversed(self.published()):
                try:
                    verify(path)
                    found = path
                    break
                except (ValueError, OSError) as problem:
                    aside = set_aside(path, "bad")
                    print(f"checkpoint {path.name} is bad: {problem}; set aside as {aside.name}", flush=True)
            error, found = self._newer_copy(found)
        self.ranks.agree(error, "looking for checkpoints")
        found = self.ranks.broadcast(None if found is None else str(found))
        return None if found is None else Path(found)

    def _newer_copy(self, found: Path | None) -> tuple[TrainingError | None, Path | None]:
        """A newer checkpoint from the mirror, if it has one, else the one that was found."""
        if self.mirror is None:
            return None, found
        try:
            return None, self.mirror.fetch_newer(int(found.name[5:]) if found else -1, self.folder) or found
        except TrainingError as problem:
            return problem, found

    def forget_after(self, step: int) -> None:
        """Sets later checkpoints aside: they are of another future than the one that begins. Collective.

        Raises:
            TrainingError: on every rank, when the mirror cannot be reached.
        """
        error = None
        if self.ranks.is_main:
            for path in [path for path in self.published() if path.name > self.path(step).name]:
                set_aside(path, "later")
            try:
                if self.mirror:
                    self.mirror.drop_after(step)
            except TrainingError as problem:
                error = problem
        self.ranks.agree(error, "setting later checkpoints aside")

    def load(self, folder: Path, model: nn.Module) -> Progress:
        """Puts the weights of a checkpoint into a model that nothing wraps yet. Collective.

        Raises:
            TrainingError: on every rank, when the checkpoint is bad or belongs to another model.
        """
        error, progress = None, Progress()
        try:
            manifest = verify(folder) if self.ranks.is_main else read_manifest(folder)
            self._refuse_changes(manifest)
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
        self.forget_after(manifest["step"])
        if self.mirror and folder.parent == self.folder and manifest["step"] not in self.mirror.known:
            self.mirror.copy(folder, manifest["progress"]["best_step"])  # its attempt ended before it was copied

    def intact(self, step: int) -> bool:
        """Whether the checkpoint of a step is here, or was fetched from the mirror, as it was written. Collective."""
        problem = None
        if self.ranks.is_main:
            try:
                if self.mirror and not self.path(step).exists():
                    self.mirror.fetch(step, self.folder)
                verify(self.path(step))
            except (ValueError, OSError, TrainingError) as error:
                problem = str(error)
                print(f"checkpoint {self.path(step).name} is bad: {problem}", flush=True)
        return self.ranks.broadcast(problem) is None

    def _refuse_changes(self, manifest: dict[str, Any]) -> None:
        """Raises ValueError, naming what has changed since the checkpoint was saved."""
        lines = refusals(manifest, self.origin.config, self.origin.versions, self.force)
        if manifest["base"] != self.origin.base:
            lines.append(
                "the base model's weights are not those that its adapters were trained on; restore them, "
                "or start a new run"
            )
        if manifest["data_fingerprint"] != self.origin.data_fingerprint and not self.force:
            lines.append(
                "the data, its tokenizer or its options changed since it was saved, so its steps would be others; "
                f"restore them, or {FORCE}"
            )
        if lines:
            raise ValueError("; ".join(lines))

    def differences(self, folder: Path) -> list[str]:
        """What options, versions and data are now beside what they were when a checkpoint was saved, a line each."""
        manifest = read_manifest(folder)
        data = manifest["data_fingerprint"] != self.origin.data_fingerprint
        return [
            *changed_options(manifest, self.origin.config).values(),
            *changed_versions(manifest, self.origin.versions),
            *(["the data are not those that the checkpoint was saved with"] if data else []),
        ]

    def _load_random_state(self, folder: Path, manifest: dict[str, Any], seed: int) -> None:
        """The saved generators on the same number of ranks; derived from seed and step on another."""
        if manifest["world"] != self.ranks.world:
            set_seed((seed + 1_000_003 * (manifest["step"] + 1) + self.ranks.rank) % 2**32)
            return
        ending = f".{self.ranks.rank}"
        states = {f"rng.{name}": tensor for name, tensor in _read(folder, "rng.")}
        set_random_state({name.removesuffix(ending): one for name, one in states.items() if name.endswith(ending)})


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
