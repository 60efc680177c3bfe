"""Chat with what a run made: one model process at a time, which holds its GPU while it is loaded.

Everything that a page or a flag sends is checked here; the models themselves are in `trainers/tools/chat.py`.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from app.console import shortened
from app.hardware import Gpu, find_gpus
from app.runs.runs import find_run, list_runs, run_of_id
from app.services.allowed_paths import path_mistakes
from app.services.rpc_client import Worker, WorkerDied
from trainers.config.options import EMBEDDED, ConfigError
from trainers.run.device_locks import Held, Holder, Need, take_now, who_has
from trainers.run.folder import RunFolder

SIDES = ("tuned", "base")
MOST_LETTERS = 100_000
"""Of a whole conversation."""
MOST_MESSAGES = 200
MOST_RUNS = 200
"""Runs that `choices` offers; older ones are named by their id."""
IDLE_SECONDS = 600.0

_ROLES = ("system", "user", "assistant")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,95}", re.ASCII)
_REVISION = re.compile(r"[\w./-]{1,100}", re.ASCII)
_CHECKPOINT = re.compile(r"step-\d{8}", re.ASCII)


@dataclass(frozen=True)
class Option:
    """One sampling option and its limits, both allowed."""

    low: float
    high: float
    default: float
    help: str
    whole: bool = False


SAMPLING = {
    "temperature": Option(0.0, 5.0, 0.0, "0 always takes the likeliest token; higher is more random."),
    "top_p": Option(0.01, 1.0, 1.0, "Only the likeliest tokens that together have this probability; 1 for all."),
    "top_k": Option(0, 1000, 0, "Only so many of the likeliest tokens; 0 for all.", whole=True),
    "max_new_tokens": Option(1, 8192, 256, "Longest answer, in tokens.", whole=True),
    "repetition_penalty": Option(0.5, 2.0, 1.0, "Above 1 makes repeated tokens less likely."),
    "seed": Option(0, 2**32 - 1, 42, "The same seed gives the same answer again.", whole=True),
}


# -- checking what is asked ------------------------------------------------------------------------------------------


def check_sampling(values: Mapping[str, Any] | None) -> dict[str, float]:
    """Every sampling option, with its default where none is given.

    Raises:
        ConfigError: for unknown names and for values that are no numbers or out of range, a line each.
    """
    if values is not None and not isinstance(values, Mapping):
        raise ConfigError("sampling is no mapping; give values by name, such as {'temperature': 0.7}")
    given, mistakes, result = dict(values or {}), [], {}
    for name in given.keys() - SAMPLING.keys():
        mistakes.append(f"sampling has no {shortened(str(name))!r}; it has {', '.join(SAMPLING)}")
    for name, option in SAMPLING.items():
        number = _number(given.get(name))
        if given.get(name) is None:
            number = option.default
        if number is None or not option.low <= number <= option.high or (option.whole and number % 1):
            kind = "a whole number" if option.whole else "a number"
            shown = shortened(repr(given.get(name)))
            mistakes.append(f"{name}={shown} is out of range; use {kind} from {option.low:g} to {option.high:.10g}")
            continue
        result[name] = int(number) if option.whole else number
    if mistakes:
        raise ConfigError(mistakes)
    return result


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def check_messages(messages: Any, system: Any = "") -> list[dict[str, str]]:
    """A conversation that ends with the user's turn, the system prompt first where there is one.

    Args:
        messages: a list of mappings with `role` and `content`; other keys are dropped.
        system: the system prompt; empty for none.

    Raises:
        ConfigError: for anything else, and for more letters or messages than are read.
    """
    if not isinstance(messages, list) or not messages or len(messages) > MOST_MESSAGES:
        raise ConfigError(f"messages is no list of 1 to {MOST_MESSAGES} messages; write one, or clear the chat")
    result = [{"role": "system", "content": _text(system, "system")}] if system else []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise ConfigError(f"message {number + 1} has no role of {', '.join(_ROLES)}; clear the chat")
        if message["role"] == "system" and (number or system):
            raise ConfigError(f"message {number + 1} is a second system prompt or not the first message; take it out")
        result.append({"role": message["role"], "content": _text(message.get("content"), f"message {number + 1}")})
    if result[-1]["role"] != "user" or not result[-1]["content"].strip():
        raise ConfigError("there is no message to answer; write one")
    letters = sum(len(message["content"]) for message in result)
    if letters > MOST_LETTERS:
        raise ConfigError(f"the conversation has {letters:,} letters, at most {MOST_LETTERS:,} are read; clear it")
    return result


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} is no text; write one")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} holds half of a character; write it again") from None
    return value.replace("\x00", "")


def weights_of(run: RunFolder) -> list[str]:
    """What of a run can be chatted with: its export, its checkpoints, newest first, and other exports."""
    checkpoints = [path.name for path in _folders(run.checkpoints) if _CHECKPOINT.fullmatch(path.name)]
    names = [path.name for path in _folders(run.path) if path.name == "model" or path.name.startswith("export-")]
    exports = [name for name in names if not name.endswith("-failed")]
    made = [
        name
        for name in exports
        if any((run.path / name / file).is_file() for file in ("config.json", "adapter_config.json"))
    ]
    own = [name for name in made if name == "model"]
    return [*own, *sorted(checkpoints, reverse=True), *sorted(set(made) - set(own))]


def _folders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []


@dataclass(frozen=True)
class Target:
    """What is loaded: a run's weights beside their base, or a base model alone.

    Args:
        name: run id, or name of the base model.
        run: the run; None for a base model alone.
        weights: name of a checkpoint or an export of the run.
        revision: of a base model on the Hub.
        device: `auto`, `cpu` or a GPU's index.
    """

    name: str
    run: RunFolder | None = field(default=None, compare=False)
    weights: str | None = None
    revision: str | None = None
    device: str = "auto"

    def request(self) -> dict[str, Any]:
        """What `trainers.tools.chat` loads."""
        if self.run is not None:
            return {"run_dir": str(self.run.path.absolute()), "weights": self.weights}
        local = Path(os.path.expanduser(self.name))
        return {"model": str(local.absolute()) if local.is_dir() else self.name, "revision": self.revision}


# -- the process -----------------------------------------------------------------------------------------------------


class Chats:
    """The one model process of a server or a command.

    Args:
        runs_dir: folder of run folders.
        roots: folders in which a base model may lie, for callers that are strangers; they name runs by id alone.
            None: any path.
        remote_code: whether model code may run, where a run or a base model asks for it.
        idle: seconds without a question after which the process ends.
    """

    def __init__(
        self,
        runs_dir: Path,
        roots: Sequence[Path] | None = None,
        remote_code: bool = False,
        idle: float = IDLE_SECONDS,
    ):
        self.runs_dir, self.roots, self.remote_code, self.idle = runs_dir, roots, remote_code, idle
        self._loading, self._changing = threading.Lock(), threading.RLock()
        self._worker: Worker | None = None
        self._held: Held | None = None
        self._gpu: Gpu | None = None
        self._target: Target | None = None
        self._stage: str | None = None
        self._about: dict[str, Any] | None = None
        self._clock: threading.Timer | None = None

    def choices(self) -> list[dict[str, Any]]:
        """The newest runs that have weights: `name`, `run_dir`, `weights` (its export and checkpoints)."""
        found = ((run, weights_of(run)) for run in list_runs(self.runs_dir))
        rows = ({"name": run.id, "run_dir": str(run.path), "weights": names} for run, names in found if names)
        return list(islice(rows, MOST_RUNS))

    def target(self, name: Any, weights: Any = None, device: Any = "auto", revision: Any = None) -> Target:
        """What a request names.

        Args:
            name: a run; or `embedded`, a Hub id or a local folder for a base model alone.
            weights: a checkpoint or export of the run; None or empty for its export, else its newest checkpoint.
            device: `auto` (a free GPU, else the CPU where there is none), `cpu`, or a GPU's index.
            revision: branch, tag or commit of a base model on the Hub.

        Raises:
            ConfigError: when there is no such thing, or it may not be read.
        """
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > 1000:
            raise ConfigError("no run is chosen; choose one, or name a base model such as `embedded`")
        device = str(device or "auto")
        if device not in ("auto", "cpu") and not re.fullmatch(r"[0-9]{1,3}", device, re.ASCII):
            raise ConfigError(f"device={shortened(device)!r} is unknown; use auto, cpu or the index of a GPU")
        if revision and not (isinstance(revision, str) and _REVISION.fullmatch(revision)):
            raise ConfigError(f"revision={shortened(str(revision))!r} is no branch, tag or commit; leave it out")
        run = None if self._is_model(name) else self._run(name)
        if run is None:
            if weights:
                raise ConfigError(f"checkpoint={shortened(str(weights))!r}: {shortened(name)} is no run; leave it out")
            return Target(name, None, None, revision or None, device)
        known = weights_of(run)
        if not known:
            raise ConfigError(f"run {run.id} has no checkpoint yet; wait for its first one, or choose another run")
        if weights and weights not in known:
            shown = ", ".join(known[:8])
            raise ConfigError(f"checkpoint={shortened(str(weights))!r} is not in run {run.id}; it has {shown}")
        return Target(run.id, run, weights or known[0], None, device)

    def weights(self, name: Any) -> list[str]:
        """What of a run can be loaded; nothing for a base model.

        Raises:
            ConfigError: when there is no such run.
        """
        if not isinstance(name, str) or self._is_model(name):
            return []
        return weights_of(self._run(name))

    def _is_model(self, name: str) -> bool:
        """Whether the name is a base model and no run.

        Raises:
            ConfigError: for a folder that strangers may not read.
        """
        if name == EMBEDDED:
            return True
        if "/" not in name:
            return False
        if self.roots is not None:
            if mistakes := path_mistakes({"model_name_or_path": name}, self.roots):
                raise ConfigError(list(mistakes.values()))
            return True
        folder = Path(os.path.expanduser(name))
        return (folder / "config.json").is_file() or (not folder.exists() and bool(_HUB_ID.fullmatch(name)))

    def _run(self, name: str) -> RunFolder:
        return find_run(name, self.runs_dir) if self.roots is None else run_of_id(name, self.runs_dir)

    def open(self, target: Target) -> Iterator[str]:
        """Loads what is not loaded yet in place of what is, and tells each stage.

        Raises:
            ConfigError: when it cannot be loaded, no GPU is free, or another request is under way.
            WorkerDied: when the process ends.
        """
        if target == self._target and self._about is not None and self._worker is not None and self._worker.alive:
            return
        if not self._loading.acquire(blocking=False):
            raise ConfigError("another model is being loaded; wait until it is there, or free it")
        try:
            if self._worker is not None and self._worker.busy:
                raise ConfigError("the model that is loaded answers now; stop it, or wait for its end")
            self.free()
            yield from self._load(target)
        finally:
            self._stage = None
            self._loading.release()

    def _load(self, target: Target) -> Iterator[str]:
        yield self._note("starting a process")
        gpu, held = _take_gpu(target)
        worker = None
        try:
            visible = {"CUDA_VISIBLE_DEVICES": gpu.uuid if gpu else ""}
            worker = Worker("trainers.tools.chat", env=visible, pass_fds=held.descriptors if held else ())
            with self._changing:
                self._worker, self._held, self._gpu, self._target = worker, held, gpu, target
            for document in worker.ask({"ask": "load", **target.request(), "remote_code": self.remote_code}):
                if "loading" in document:
                    yield self._note(document["loading"])
                if document.get("ready"):
                    self._about = document
            if self._about is None:
                raise ConfigError("loading was stopped; load it again when you want to chat")
        except WorkerDied:
            if not worker or self._worker is not worker:
                raise ConfigError("the model was freed while it was loaded; load it again to chat") from None
            raise
        finally:
            if self._about is None:
                self.free()
                if held is not None:
                    held.close()
        self._wind()

    def _note(self, stage: str) -> str:
        self._stage = stage
        return stage

    def ask(
        self, messages: Any, side: Any = "tuned", sampling: Any = None, system: Any = "", plain: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Asks the loaded model: documents with `side` and a piece of `text`, and one with `answer` after each side.

        Args:
            messages: the conversation, as `check_messages` takes it.
            side: `base`, `tuned`, or `both`, one after the other.
            sampling: values by name; see `SAMPLING`.
            system: the system prompt.
            plain: complete the messages as plain text, without the chat template.

        Raises:
            ConfigError: for a wrong request, or when nothing is loaded.
            WorkerDied: when the process ends.
        """
        request = {"messages": check_messages(messages, system), "sampling": check_sampling(sampling)}
        worker, about = self._worker, self._about
        if worker is None or about is None:
            raise ConfigError("no model is loaded; choose a run and load it")
        sides = [name for name in SIDES if name in about["sides"]] if side == "both" else [side]
        if sides[0] not in about["sides"]:
            raise ConfigError(f"side={shortened(str(side))!r} is not loaded; there is: {', '.join(about['sides'])}")
        try:
            for one in sides:
                for document in worker.ask({"ask": "answer", "side": one, "plain": bool(plain), **request}):
                    if document.get("cancelled"):
                        yield {"side": one, "finish": "cancelled"}
                        return
                    if not document.get("end"):
                        yield {"side": one, **document}
        except WorkerDied:
            if self._worker is not worker:
                raise ConfigError("the model was freed while it answered; load it again to go on") from None
            self.free()
            raise
        finally:
            self._wind()

    def stop(self) -> None:
        """Ends the answer under way, if there is one."""
        if self._worker is not None:
            self._worker.cancel()

    def free(self) -> None:
        """Ends the process and gives its GPU back; without one it does nothing."""
        with self._changing:
            worker, held, clock = self._worker, self._held, self._clock
            self._worker = self._held = self._gpu = self._target = self._about = self._clock = None
        if clock is not None:
            clock.cancel()
        if worker is not None:
            worker.close()
        if held is not None:
            held.close()

    def _wind(self) -> None:
        """Starts the idle time anew."""
        with self._changing:
            if self._clock is not None:
                self._clock.cancel()
            if self._worker is not None:
                self._clock = threading.Timer(self.idle, self._idle_over)
                self._clock.daemon = True
                self._clock.start()

    def _idle_over(self) -> None:
        if self._worker is not None and self._worker.busy:
            self._wind()
        else:
            self.free()

    def state(self) -> dict[str, Any]:
        """What is loaded: `loaded`, `loading` (a stage or None), `name`, `weights`, `device`, `pid`, `busy`,
        `memory_bytes` (of the process), `idle_seconds` (since the last answer), and what the process said of itself."""
        worker, target, about, gpu = self._worker, self._target, self._about, self._gpu
        if about is not None and worker is not None and not worker.alive:
            self.free()
            worker = target = about = gpu = None
        memory = None
        if worker is not None:
            with contextlib.suppress(psutil.Error):
                memory = psutil.Process(worker.pid).memory_info().rss
        said = {key: value for key, value in (about or {}).items() if key not in ("ready", "device", "end")}
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
            **said,
        }


def _take_gpu(target: Target) -> tuple[Gpu | None, Held | None]:
    """The first free GPU of those that the target allows, locked; none for the CPU, which is shared with all runs.

    Raises:
        ConfigError: when each is held or waited for, or there is no such GPU.
    """
    found = find_gpus() if target.device != "cpu" else []
    wanted = [gpu for gpu in found if target.device in ("auto", str(gpu.index))]
    if not wanted and target.device not in ("auto", "cpu"):
        here = ", ".join(str(gpu.index) for gpu in found) or "none"
        raise ConfigError(f"device={target.device}: there is no such GPU (here: {here}); use auto or cpu")
    for gpu in wanted:
        with contextlib.suppress(ConfigError):
            return gpu, take_now(Need((gpu.uuid,)), Holder(f"chat with {target.name}"))
    if wanted:
        who = who_has(Need(tuple(gpu.uuid for gpu in wanted))) or "queued runs wait for it"
        raise ConfigError(f"no GPU is free for the chat: {who}; wait, stop that run, or use device cpu")
    return None, None
