"""Checkpoints: save, publish, prune, load. Safetensors and JSON only; no pickle is written or read.

A checkpoint is first copied to host memory, then written by a thread under a temporary name while training continues.
It is renamed once it is complete, and only then are older ones pruned. Tensors are keyed by their transformers or peft
names, so that any layout can read them.
"""

from __future__ import annotations

import errno
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

from trainers.checkpoint.remote import RemoteCopy
from trainers.checkpoint.rng import random_state, set_random_state
from trainers.checkpoint.weights import EXTRA, OTHER_BASE, STATE, load_weights
from trainers.model.stored import Source
from trainers.parallel.adafactor import MEANS
from trainers.parallel.backend import Backend
from trainers.parallel.optimizer import means_of
from trainers.parallel.ranks import Ranks
from trainers.parallel.shards import WEIGHT, gather_full_tensors, steps_of
from trainers.run.compatibility import FORCE, changed_options, changed_versions, refusals
from trainers.run.errors import TrainingError
from trainers.run.folder import folder_identity, write_json
from trainers.run.manifest import FORMAT, Origin, Progress, read_manifest, remove, seal, set_aside, sha256, sync, verify

_BAD = (ValueError, KeyError, OSError, SafetensorError, RuntimeError)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, so that training can continue."""
    return tensor.detach().to("cpu", copy=True).contiguous()


@dataclass(frozen=True)
class Pending:
    """A checkpoint that is being written.

    Args:
        temporary: the folder that it is written to.
        progress: training progress at its step.
        needed: bytes of the tensors of all ranks.
        entry: this rank's entry in the manifest, set by the thread that writes.
    """

    temporary: Path
    progress: Progress
    needed: int
    entry: Future[dict[str, Any]]


@dataclass(frozen=True)
class Saved:
    """A published checkpoint.

    Args:
        step: its step.
        bytes: size of its tensors.
        write_seconds: time that the slowest rank took to write.
    """

    step: int
    bytes: int
    write_seconds: float

    def line(self, stalled: float) -> str:
        """The line of the log; training was blocked for `stalled` seconds."""
        return (
            f"saved the checkpoint of step {self.step}: {self.bytes:,} bytes in {self.write_seconds:.2f} s; "
            f"training was blocked for {stalled:.2f} s"
        )

    def row(self, stalled: float) -> dict[str, Any]:
        """The row of the metrics file; training was blocked for `stalled` seconds."""
        size = {"checkpoint_bytes": self.bytes, "checkpoint_write_s": self.write_seconds}
        return {"step": self.step, **size, "checkpoint_stall_s": stalled}


class Checkpoints:
    """The checkpoints of one run; at most one is being written at a time.

    Args:
        folder: `checkpoints/` of the run folder.
        ranks: the processes that save together.
        origin: provenance, recorded in every manifest.
        limit: number of checkpoints to keep besides the best one; at least 2.
        attempt: number of this start of the run; part of the temporary name.
        force: load even if data, options or code have changed since the checkpoint was saved.

    `remote_copy`, set on rank 0, gets a copy of each published checkpoint. `extra` holds tensors by name, equal on
    every rank, that checkpoints contain besides the state of the model.
    """

    def __init__(
        self, folder: Path, ranks: Ranks, origin: Origin, limit: int = 2, attempt: int = 0, force: bool = False
    ):
        self.folder = folder
        self.ranks = ranks
        self.origin = origin
        self.home = folder_identity(folder.parent)  # a run folder that is removed later must not reappear
        self.limit = max(limit, 2)
        self.attempt = attempt
        self.force = force
        self.remote_copy: RemoteCopy | None = None
        self.extra: dict[str, torch.Tensor] = {}
        self.pending: Pending | None = None

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of a step."""
        return self.folder / f"step-{step:08d}"

    def published(self) -> list[Path]:
        """Published checkpoints, oldest first."""
        return sorted(path for path in self.folder.glob("step-" + "[0-9]" * 8) if path.is_dir())

    def begin(self, backend: Backend, buffers: dict[str, torch.Tensor], progress: Progress) -> None:
        """Copies everything to host memory at `progress.step` and starts writing it in a thread. Collective.

        Args:
            backend: holds weights and optimizer state, in any layout.
            buffers: the buffers that `persistent_buffers` names, equal on every rank.
            progress: training progress, saved in the manifest.

        Raises:
            TrainingError: on every rank, if any rank lacks disk space; earlier checkpoints are unaffected.
        """
        assert self.pending is None, "the previous checkpoint is not finished"
        temporary = self.folder / f"{self.path(progress.step).name}.tmp-{self.attempt}"
        error = None
        tensors = self._share(backend, buffers)
        needed = sum(self.ranks.gather(sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())))
        try:
            self._check_room(needed)
            temporary.mkdir(exist_ok=True)
        except Exception as problem:
            error = problem
        self._agree(error, temporary, f"saving the checkpoint of step {progress.step}")
        entry: Future[dict[str, Any]] = Future()
        self.pending = Pending(temporary, progress, needed, entry)
        Thread(target=self._write, args=(temporary, tensors, needed, entry), name="checkpoint", daemon=True).start()

    def written(self, timeout: float = 0.0) -> bool:
        """Whether this rank has finished writing.

        Args:
            timeout: seconds to wait for it.
        """
        return self.pending is None or not wait_for([self.pending.entry], timeout).not_done

    def copied(self, timeout: float = 0.0) -> bool:
        """Whether the remote copy, if this rank has one, is up to date.

        Args:
            timeout: seconds to wait for it.
        """
        return self.remote_copy is None or self.remote_copy.copied(timeout)

    def finish(self) -> Saved | None:
        """Publishes the pending checkpoint once every rank has written its file; None if there is none. Collective.

        Raises:
            TrainingError: on every rank, if any rank could not write; earlier checkpoints are unaffected.
        """
        if self.pending is None:
            return None
        # Every rank has written its file, or all of them raise.
        pending, self.pending = self.pending, None
        error = pending.entry.exception()  # waits for the thread
        entry = pending.entry.result() if error is None else {}
        step = pending.progress.step
        self._agree(error, pending.temporary, f"saving the checkpoint of step {step}")
        # Rank 0 writes the manifest and renames the folder.
        entries = self.ranks.gather(entry)
        error = None
        if self.ranks.is_main:
            try:
                self._publish(pending.temporary, self.path(step), pending.progress, entries)
            except OSError as problem:
                error = self._explain_full_disk(problem, pending.needed)
        self.ranks.agree(error, f"publishing the checkpoint of step {step}")
        return Saved(step, pending.needed, max(entry["seconds"] for entry in entries))

    def _agree(self, error: BaseException | None, temporary: Path, action: str) -> None:
        """Raises on every rank if any of them failed, after removing what was written."""
        try:
            self.ranks.agree(error, action)
        except TrainingError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _share(self, backend: Backend, buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The full tensors that this rank writes, copied to the CPU, and its random state. Collective."""
        # Copy each gathered tensor to the CPU at once, so that the device holds only one full tensor at a time.
        tensors: dict[str, torch.Tensor] = {}
        shards = backend.shards()
        steps = steps_of(shards, self.ranks)
        for name, key, owner, tensor in gather_full_tensors(shards, steps, self.ranks):
            if owner == self.ranks.rank and tensor is not None:
                tensors[f"model.{name}" if key == WEIGHT else f"optim.state.{name}.{key}"] = _copy(tensor)
        if self.ranks.is_main:
            tensors |= {f"optim.state.{name}.step": torch.tensor(step) for name, step in steps.items()}
            means = means_of(backend.optimizer).items()
            tensors |= {f"{STATE}{name}.{key}": _copy(mean) for name, own in means for key, mean in own.items()}
            tensors |= {f"model.{name}": _copy(buffer) for name, buffer in buffers.items()}
            tensors |= {f"{EXTRA}{name}": tensor for name, tensor in self.extra.items()}
        # Generator states differ between ranks: each saves its own.
        return tensors | {f"{name}.{self.ranks.rank}": state for name, state in random_state().items()}

    def _check_room(self, needed: int) -> None:
        if folder_identity(self.folder.parent) != self.home:
            raise FileNotFoundError(errno.ENOENT, "the run folder was removed or replaced", str(self.folder.parent))
        self.folder.mkdir(exist_ok=True)
        if shutil.disk_usage(self.folder).free < needed * 1.01 + 2**20:
            raise self._explain_full_disk(OSError(errno.ENOSPC, ""), needed)

    def _explain_full_disk(self, problem: Exception, needed: int) -> Exception:
        """Turns a disk-full error into one that states the free and the needed bytes; also that of a full quota."""
        if getattr(problem, "errno", None) == errno.EDQUOT or f"os error {errno.EDQUOT}" in str(problem):
            return OSError(
                f"Disk quota exceeded in {self.folder}, a checkpoint needs {needed:,} bytes; "
                "free space, then resume from the last one"
            )
        if getattr(problem, "errno", None) != errno.ENOSPC and f"os error {errno.ENOSPC}" not in str(problem):
            return problem
        free = shutil.disk_usage(self.folder).free
        return OSError(
            f"{self.folder} has {free:,} bytes free, a checkpoint needs {needed:,}; "
            "free space, then resume from the last one"
        )

    def _write(self, temporary: Path, tensors: dict[str, torch.Tensor], needed: int, entry: Future[Any]) -> None:
        """Body of the writing thread; any error is passed on, so that all ranks agree on it."""
        try:
            began = time.perf_counter()
            file_entry = self._write_share(temporary, tensors)
            entry.set_result({**file_entry, "seconds": time.perf_counter() - began})
        except Exception as problem:
            entry.set_exception(self._explain_full_disk(problem, needed))

    def _write_share(self, temporary: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Writes this rank's file; returns its manifest entry: name, bytes, sha256, tensors."""
        path = temporary / f"rank-{self.ranks.rank:05d}.safetensors"
        save_file(tensors, path)
        sync(path)
        shapes = {
            name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype)[6:]} for name, tensor in tensors.items()
        }
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
        # Flush everything to disk before the rename makes it visible; only then may older checkpoints go.
        write_json(temporary / "manifest.json", {**manifest, "seal": seal(manifest)})
        sync(temporary)
        if final.exists():
            set_aside(final, "later")  # this step was repeated after resuming from an older one
        os.replace(temporary, final)
        sync(self.folder)
        self._prune(progress)
        if self.remote_copy:
            self.remote_copy.copy(final, progress.best_step)

    def _prune(self, progress: Progress) -> None:
        best = self.path(progress.best_step) if progress.best_step is not None else None
        in_use = [best, *(self.remote_copy.in_use() if self.remote_copy else [])]
        old = [path for path in self.published() if path not in in_use][: -self.limit]
        aside = [path for name in ("step-*.tmp-*", "later-step-*") for path in self.folder.glob(name)]
        for path in [*old, *aside]:
            remove(path)

    def newest(self) -> Path | None:
        """The newest checkpoint that verifies, local or remote; sets bad ones aside and reports them. Collective.

        Raises:
            TrainingError: on every rank, if the remote copies cannot be read.
        """
        newest, error = None, None
        if self.ranks.is_main:
            for path in reversed(self.published()):
                try:
                    verify(path)
                    newest = path
                    break
                except (ValueError, OSError) as problem:
                    aside = set_aside(path, "bad")
                    print(f"checkpoint {path.name} is bad: {problem}; set aside as {aside.name}", flush=True)
            error, newest = self._newer_remote_copy(newest)
        self.ranks.agree(error, "looking for checkpoints")
        newest = self.ranks.broadcast(None if newest is None else str(newest))
        return None if newest is None else Path(newest)

    def _newer_remote_copy(self, newest: Path | None) -> tuple[TrainingError | None, Path | None]:
        """A newer checkpoint from the remote copies, if there is one; otherwise `newest`."""
        if self.remote_copy is None:
            return None, newest
        try:
            return None, self.remote_copy.fetch_newer(int(newest.name[5:]) if newest else -1, self.folder) or newest
        except TrainingError as problem:
            return problem, newest

    def forget_after(self, step: int) -> None:
        """Sets checkpoints after `step` aside, as training will compute those steps again. Collective.

        Raises:
            TrainingError: on every rank, if the remote copies cannot be removed.
        """
        error = None
        if self.ranks.is_main:
            for path in [path for path in self.published() if path.name > self.path(step).name]:
                set_aside(path, "later")
            try:
                if self.remote_copy:
                    self.remote_copy.drop_after(step)
            except TrainingError as problem:
                error = problem
        self.ranks.agree(error, "setting later checkpoints aside")

    def load(self, folder: Path, model: nn.Module, stored: dict[str, Source] | None = None) -> Progress:
        """Loads the weights of a checkpoint into a model that is not wrapped yet. Collective.

        Args:
            folder: the checkpoint.
            model: the model.
            stored: see `load_weights`.

        Raises:
            TrainingError: on every rank, if the checkpoint is bad or belongs to another model.
        """
        error, progress = None, Progress()
        try:
            manifest = verify(folder) if self.ranks.is_main else read_manifest(folder)
            self._refuse_changes(manifest)
            load_weights(folder, model, stored, resumes=True)
            progress = Progress.from_json(manifest["progress"])
        except _BAD as problem:
            error = problem
        self.ranks.agree(error, f"loading {folder}")
        return progress

    def restore(self, folder: Path, backend: Backend, seed: int) -> None:
        """Restores optimizer state and random generators, after `load` has set the weights. Collective.

        Raises:
            TrainingError: on every rank, if the optimizer state does not fit this optimizer.
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
        if self.remote_copy and folder.parent == self.folder and manifest["step"] not in self.remote_copy.known:
            # The attempt that saved this checkpoint ended before copying it.
            self.remote_copy.copy(folder, manifest["progress"]["best_step"])

    def extra_tensors(self, folder: Path) -> dict[str, torch.Tensor]:
        """The tensors that `extra` held when a checkpoint was saved. Collective.

        Raises:
            TrainingError: on every rank, if the checkpoint cannot be read.
        """
        error, tensors = None, dict[str, torch.Tensor]()
        try:
            tensors = dict(_read(folder, EXTRA))
        except _BAD as problem:
            error = problem
        self.ranks.agree(error, f"loading {folder}")
        return tensors

    def intact(self, step: int) -> bool:
        """Whether the checkpoint of a step, downloaded if necessary, is exactly as written. Collective."""
        problem = None
        if self.ranks.is_main:
            try:
                if self.remote_copy and not self.path(step).exists():
                    self.remote_copy.fetch(step, self.folder)
                verify(self.path(step))
            except (ValueError, OSError, TrainingError) as error:
                problem = str(error)
                print(f"checkpoint {self.path(step).name} is bad: {problem}", flush=True)
        return self.ranks.broadcast(problem) is None

    def _refuse_changes(self, manifest: dict[str, Any]) -> None:
        """Raises `ValueError` listing what has changed since the checkpoint was saved."""
        lines = list(map(str, refusals(manifest, self.origin.config, self.origin.versions, self.force)))
        if manifest["base"] != self.origin.base:
            lines.append(f"{OTHER_BASE}; restore them, or start a new run")
        if manifest["data_fingerprint"] != self.origin.data_fingerprint and not self.force:
            lines.append(
                "the data, its tokenizer or its options changed since it was saved, so the batches would differ; "
                f"restore them, or {FORCE}"
            )
        if lines:
            raise ValueError("; ".join(lines))

    def differences(self, folder: Path) -> list[str]:
        """Options, versions and data that have changed since a checkpoint was saved, one line each."""
        manifest = read_manifest(folder)
        data = manifest["data_fingerprint"] != self.origin.data_fingerprint
        return [
            *map(str, changed_options(manifest, self.origin.config)),
            *map(str, changed_versions(manifest, self.origin.versions)),
            *(["the data has changed since the checkpoint was saved"] if data else []),
        ]

    def _load_random_state(self, folder: Path, manifest: dict[str, Any], seed: int) -> None:
        """Restores the saved generators on the same number of ranks; otherwise seeds them from seed and step."""
        if manifest["world"] != self.ranks.world:
            set_seed((seed + 1_000_003 * (manifest["step"] + 1) + self.ranks.rank) % 2**32)
            return
        suffix = f".{self.ranks.rank}"
        states = {f"rng.{name}": tensor for name, tensor in _read(folder, "rng.")}
        set_random_state({name.removesuffix(suffix): state for name, state in states.items() if name.endswith(suffix)})


def _read(folder: Path, prefix: str, suffix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields tensors whose names start with `prefix` and end with `suffix`, with both removed from the name."""
    for file in sorted(read_manifest(folder)["files"]):
        with safe_open(folder / file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a safetensors handle is not a dict
                if name.startswith(prefix) and name.endswith(suffix):
                    yield name.removeprefix(prefix).removesuffix(suffix), tensors.get_tensor(name)


def _load_optimizer(folder: Path, manifest: dict[str, Any], backend: Backend) -> None:
    """Fills each weight's optimizer state with this rank's span of the saved tensors."""
    # Names are `optim.state.<weight>.<key>`; weight names contain dots, keys do not.
    state = {name.removeprefix(STATE).rpartition(".")[::2] for name in manifest["tensors"] if name.startswith(STATE)}
    steps = {name: float(value) for name, value in _read(folder, STATE, ".step")}
    if not steps:
        return
    keys: dict[str, list[str]] = {name: [] for name in steps}
    for weight, key in sorted(state):
        if key not in ("step", *MEANS):
            keys[weight].append(key)
    backend.init_optimizer_state(keys, steps)
    means = means_of(backend.optimizer)
    shards = {shard.name: shard for shard in backend.shards()}
    for name, tensor in _read(folder, STATE):
        weight, _, key = name.rpartition(".")
        if key in MEANS:
            means.setdefault(weight, {})[key] = tensor.to(backend.device)
        elif key != "step" and shards[weight].elements:
            shards[weight].fill(key, tensor)
    backend.write_shards(list(shards.values()))
