"""Chat with a run's model: one model process at a time, which holds its GPU while loaded.

Input from pages and flags is checked here; the models themselves run in `trainers/tools/chat.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from app.console import shortened
from app.hardware import Gpu, find_gpus
from app.runs.runs import find_run, list_runs, run_of_id
from app.services.allowed_paths import path_mistakes
from app.services.chat_messages import check_messages, check_sampling, check_tools
from app.services.rpc_client import Worker, WorkerDied
from trainers.config.mistakes import ConfigError
from trainers.config.options import EMBEDDED
from trainers.run.device_locks import HeldSlots, Holder, Need, take_now, who_has
from trainers.run.folder import RunFolder
from trainers.run.from_run import ADAPTER_CONFIG

SIDES = ("tuned", "base")
MAX_RUNS = 200
"""Runs that `choices` offers; older ones can be entered by id."""
IDLE_SECONDS = 600.0

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,95}", re.ASCII)
_REVISION = re.compile(r"[\w./-]{1,100}", re.ASCII)
_CHECKPOINT = re.compile(r"step-\d{8}", re.ASCII)


def weights_of(run: RunFolder) -> list[str]:
    """The weights of a run that can be loaded: its export, its checkpoints, newest first, and other exports."""
    checkpoints = [path.name for path in _folders(run.checkpoints) if _CHECKPOINT.fullmatch(path.name)]
    names = [path.name for path in _folders(run.path) if path.name == "model" or path.name.startswith("export-")]
    exports = [name for name in names if not name.endswith("-failed")]
    loadable = [
        name
        for name in exports
        if any((run.path / name / file).is_file() for file in ("config.json", "adapter_config.json"))
    ]
    own = [name for name in loadable if name == "model"]
    return [*own, *sorted(checkpoints, reverse=True), *sorted(set(loadable) - set(own))]


def _folders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []


@dataclass(frozen=True)
class Target:
    """What to load: a run's weights and their base model, or a base model alone.

    Args:
        name: run id, or name of the base model.
        run: the run; None for a base model alone.
        weights: name of a checkpoint or export of the run.
        revision: of a base model on the Hub.
        device: `auto`, `cpu` or a GPU's index.
        is_adapter: whether `name` is the folder of an adapter.
    """

    name: str
    run: RunFolder | None = field(default=None, compare=False)
    weights: str | None = None
    revision: str | None = None
    device: str = "auto"
    is_adapter: bool = False

    def request(self) -> dict[str, Any]:
        """The `load` request for `trainers.tools.chat`."""
        if self.run is not None:
            return {"run_dir": str(self.run.path.absolute()), "weights": self.weights}
        local = Path(os.path.expanduser(self.name))
        if self.is_adapter:
            return {"adapter": str(local.absolute())}
        return {"model": str(local.absolute()) if local.is_dir() else self.name, "revision": self.revision}


# -- the process -----------------------------------------------------------------------------------------------------


class Chats:
    """The one model process of a server or a command.

    Args:
        runs_dir: folder of run folders.
        roots: folders that untrusted callers may load base models from; they may name runs only by id. None allows
            any path.
        remote_code: whether model code may run, where a run or a base model requires it.
        idle: seconds without a request after which the process ends.
    """

    def __init__(
        self,
        runs_dir: Path,
        roots: Sequence[Path] | None = None,
        remote_code: bool = False,
        idle: float = IDLE_SECONDS,
    ):
        self.runs_dir = runs_dir
        self.roots = roots
        self.remote_code = remote_code
        self.idle = idle
        self._load_lock = threading.Lock()
        self._state_lock = threading.RLock()
        self._worker: Worker | None = None
        self._gpu_lock: HeldSlots | None = None
        self._gpu: Gpu | None = None
        self._target: Target | None = None
        self._stage: str | None = None
        self._model_info: dict[str, Any] | None = None
        self._idle_timer: threading.Timer | None = None

    def choices(self) -> list[dict[str, Any]]:
        """The newest runs that have weights: `name`, `run_dir`, `weights` (its export and checkpoints)."""
        candidates = ((run, weights_of(run)) for run in list_runs(self.runs_dir))
        rows = ({"name": run.id, "run_dir": str(run.path), "weights": names} for run, names in candidates if names)
        return list(islice(rows, MAX_RUNS))

    def target(self, name: Any, weights: Any = None, device: Any = "auto", revision: Any = None) -> Target:
        """Resolves a request to a target.

        Args:
            name: a run; or `embedded`, a Hub id or a local folder for a base model alone.
            weights: a checkpoint or export of the run; None or empty for its export, otherwise its newest checkpoint.
            device: `auto` (a free GPU, or the CPU on a machine without GPUs), `cpu`, or a GPU's index.
            revision: branch, tag or commit of a base model on the Hub.

        Raises:
            ConfigError: when it does not exist or may not be read.
        """
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > 1000:
            raise ConfigError("no run is selected; choose one, or enter a base model such as `embedded`")
        device = str(device or "auto")
        check_device(device, revision)
        run = None if self._is_model(name) else self._run(name)
        if revision and (run is not None or name == EMBEDDED or Path(os.path.expanduser(name)).is_dir()):
            problem = f"is of the Hub, and {shortened(name)} is not"
            raise ConfigError.about("revision", shortened(str(revision)), problem, "leave it out")
        if run is None:
            if weights:
                raise ConfigError(f"checkpoint={shortened(str(weights))!r}: {shortened(name)} is not a run; omit it")
            # An adapter names its base, which may be anywhere: only trusted callers may load it.
            is_adapter = self.roots is None and (Path(os.path.expanduser(name)) / ADAPTER_CONFIG).is_file()
            return Target(name, None, None, revision or None, device, is_adapter)
        known = weights_of(run)
        if not known:
            raise ConfigError(f"run {run.id} has no checkpoint yet; wait for its first one, or choose another run")
        if weights and weights not in known:
            listed = ", ".join(known[:8])
            raise ConfigError(f"checkpoint={shortened(str(weights))!r} is not in run {run.id}; it has {listed}")
        return Target(run.id, run, weights or known[0], None, device)

    def weights(self, name: Any) -> list[str]:
        """The weights of a run that can be loaded; none for a base model.

        Raises:
            ConfigError: for an unknown run.
        """
        if not isinstance(name, str) or self._is_model(name):
            return []
        return weights_of(self._run(name))

    def _is_model(self, name: str) -> bool:
        """Whether the name is a base model rather than a run.

        Raises:
            ConfigError: for a folder outside the allowed ones.
        """
        if name == EMBEDDED:
            return True
        if "/" not in name:
            return False
        if self.roots is not None:
            if mistakes := path_mistakes({"model_name_or_path": name}, self.roots):
                raise ConfigError(mistakes)
            return True
        folder = Path(os.path.expanduser(name))
        is_model = any((folder / file).is_file() for file in ("config.json", ADAPTER_CONFIG))
        return is_model or (not folder.exists() and bool(HUB_ID.fullmatch(name)))

    def _run(self, name: str) -> RunFolder:
        return find_run(name, self.runs_dir) if self.roots is None else run_of_id(name, self.runs_dir)

    def open(self, target: Target, beside: Chats | None = None) -> Iterator[str]:
        """Loads the target, replacing what is loaded, and yields each stage; does nothing if it is already loaded.

        Args:
            target: what to load.
            beside: a model with which it may share a GPU, if no other is free.

        Raises:
            ConfigError: when it cannot be loaded, no GPU is free, or another request is in progress.
            WorkerDied: when the process ends.
        """
        if target == self._target and self._model_info is not None and self._worker is not None and self._worker.alive:
            return
        if not self._load_lock.acquire(blocking=False):
            raise ConfigError("another model is being loaded; wait for it, or free it")
        try:
            if self._worker is not None and self._worker.busy:
                raise ConfigError("the loaded model is answering; stop it, or wait until it is done")
            self.free()
            yield from self._load(target, beside)
        finally:
            self._stage = None
            self._load_lock.release()

    def _load(self, target: Target, beside: Chats | None) -> Iterator[str]:
        yield self._set_stage("starting a process")
        gpu, lock = _take_gpu_or_share(target, beside)
        worker = None
        try:
            descriptors = lock.descriptors if lock else ()
            visible = {"CUDA_VISIBLE_DEVICES": gpu.uuid if gpu else ""}
            worker = Worker("trainers.tools.chat", env=visible, pass_fds=descriptors)
            with self._state_lock:
                self._worker = worker
                self._gpu_lock = lock
                self._gpu = gpu
                self._target = target
            for document in worker.ask({"ask": "load", **target.request(), "remote_code": self.remote_code}):
                if "loading" in document:
                    yield self._set_stage(document["loading"])
                if document.get("ready"):
                    self._model_info = document
            if self._model_info is None:
                raise ConfigError("loading was cancelled; load the model again to chat")
        except WorkerDied:
            if not worker or self._worker is not worker:
                raise ConfigError("the model was freed while loading; load it again to chat") from None
            raise
        finally:
            if self._model_info is None:
                self.free()
                if lock is not None:
                    lock.close()
        self._restart_idle_timer()

    def _set_stage(self, stage: str) -> str:
        self._stage = stage
        return stage

    def ask(
        self, messages: Any, side: Any = "tuned", sampling: Any = None, system: Any = "", plain: bool = False,
        tools: Any = None,
    ) -> Iterator[dict[str, Any]]:  # fmt: skip
        """Streams the loaded model's answer: documents with `side` and new `text`, then one with `answer` per side.

        See `trainers.tools.chat.Chat.answer` for what else they have.

        Args:
            messages: the conversation, see `check_messages`.
            side: `base`, `tuned`, or `both` in turn.
            sampling: values by name; see `SAMPLING`.
            system: the system prompt.
            plain: complete the messages as plain text, without the chat template.
            tools: that the model may call, see `check_tools`; nothing executes what it calls.

        Raises:
            ConfigError: for a wrong request, or when nothing is loaded.
            WorkerDied: when the process ends.
        """
        request = {
            "messages": check_messages(messages, system), "sampling": check_sampling(sampling),
            "tools": check_tools(tools),
        }  # fmt: skip
        worker, about = self._worker, self._model_info
        if worker is None or about is None:
            raise ConfigError("no model is loaded; choose a run and load it")
        sides = [name for name in SIDES if name in about["sides"]] if side == "both" else [side]
        if sides[0] not in about["sides"]:
            raise ConfigError(f"side={shortened(str(side))!r} is not loaded; loaded: {', '.join(about['sides'])}")
        try:
            for name in sides:
                for document in worker.ask({"ask": "answer", "side": name, "plain": bool(plain), **request}):
                    if document.get("cancelled"):
                        yield {"side": name, "finish": "cancelled"}
                        return
                    if not document.get("end"):
                        yield {"side": name, **document}
        except WorkerDied:
            if self._worker is not worker:
                raise ConfigError("the model was freed while it answered; load it again to continue") from None
            self.free()
            raise
        finally:
            self._restart_idle_timer()

    def stop(self) -> None:
        """Stops the current answer, if any."""
        if self._worker is not None:
            self._worker.cancel()

    def free(self) -> None:
        """Ends the process, if any, and releases its GPU."""
        with self._state_lock:
            worker, lock, timer = self._worker, self._gpu_lock, self._idle_timer
            self._worker = self._gpu_lock = self._gpu = self._target = self._model_info = self._idle_timer = None
        if timer is not None:
            timer.cancel()
        if worker is not None:
            worker.close()
        if lock is not None:
            lock.close()

    def _restart_idle_timer(self) -> None:
        """Frees the model after `idle` seconds from now, unless called again."""
        with self._state_lock:
            if self._idle_timer is not None:
                self._idle_timer.cancel()
            if self._worker is not None:
                self._idle_timer = threading.Timer(self.idle, self._free_if_idle)
                self._idle_timer.daemon = True
                self._idle_timer.start()

    def _free_if_idle(self) -> None:
        if self._worker is not None and self._worker.busy:
            self._restart_idle_timer()
        else:
            self.free()

    def state(self) -> dict[str, Any]:
        """What is loaded.

        Returns:
            `loaded`, `loading` (a stage or None), `name`, `weights`, `device`, `pid`, `busy`, `memory_bytes` (of the
            process), `idle_seconds` (since the last answer), and what the process reported about the model.
        """
        worker, target, about, gpu = self._worker, self._target, self._model_info, self._gpu
        if about is not None and worker is not None and not worker.alive:
            self.free()
            worker = target = about = gpu = None
        memory = None
        if worker is not None:
            with contextlib.suppress(psutil.Error):
                memory = psutil.Process(worker.pid).memory_info().rss
        details = {key: value for key, value in (about or {}).items() if key not in ("ready", "device", "end")}
        return {
            "loaded": about is not None,
            "loading": self._stage,
            "name": target.name if target else None,
            "weights": target.weights if target else None,
            "device": f"GPU {gpu.index} ({gpu.name})" if gpu else "CPU" if worker else None,
            "pid": worker.pid if worker else None,
            "busy": bool(worker and worker.busy and about),
            "memory_bytes": memory,
            "idle_seconds": time.monotonic() - worker.last_used if worker else None,
            **details,
        }


def check_device(device: str, revision: Any) -> None:
    """Checks where a model is to run, and which revision of it.

    Args:
        device: `auto`, `cpu` or a GPU's index.
        revision: branch, tag or commit of a model on the Hub; None or empty for none.

    Raises:
        ConfigError: for anything else.
    """
    if device not in ("auto", "cpu") and not re.fullmatch(r"[0-9]{1,3}", device, re.ASCII):
        raise ConfigError(f"device={shortened(device)!r} is unknown; use auto, cpu or the index of a GPU")
    if revision and not (isinstance(revision, str) and _REVISION.fullmatch(revision)):
        raise ConfigError(f"revision={shortened(str(revision))!r} is not a branch, tag or commit; omit it")


def _take_gpu_or_share(target: Target, beside: Chats | None) -> tuple[Gpu | None, HeldSlots | None]:
    """See `take_gpu`; if none is free, the GPU of `beside`."""
    try:
        return take_gpu(target.device, f"chat with {target.name}")
    except ConfigError:
        gpu, lock = (beside._gpu, beside._gpu_lock) if beside else (None, None)
        if gpu is None or lock is None or not lock.slots or target.device not in ("auto", str(gpu.index)):
            raise
        return gpu, lock.share()


def take_gpu(device: str, purpose: str) -> tuple[Gpu | None, HeldSlots | None]:
    """Locks the first free GPU that a request allows; `(None, None)` for the CPU, which needs no lock.

    Args:
        device: `auto`, `cpu` or a GPU's index.
        purpose: what others see as its holder, such as `chat with RUN`.

    Raises:
        ConfigError: when all of them are held or queued for, or there is no such GPU.
    """
    gpus = find_gpus() if device != "cpu" else []
    candidates = [gpu for gpu in gpus if device in ("auto", str(gpu.index))]
    if not candidates and device not in ("auto", "cpu"):
        available = ", ".join(str(gpu.index) for gpu in gpus) or "none"
        raise ConfigError(f"device={device}: there is no such GPU (available: {available}); use auto or cpu")
    for gpu in candidates:
        with contextlib.suppress(ConfigError):
            return gpu, take_now(Need((gpu.uuid,)), Holder(purpose))
    if candidates:
        holder = who_has(Need(tuple(gpu.uuid for gpu in candidates))) or "queued runs wait for it"
        raise ConfigError(f"no GPU is free to {purpose}: {holder}; wait, stop that run, or use device cpu")
    return None, None
