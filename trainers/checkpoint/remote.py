"""Copies of a run's checkpoints somewhere else: any place that fsspec knows, such as `s3://bucket/run`.

A machine that is taken away takes its disk along. Each published checkpoint is copied while training goes on, its
manifest last, so that a copy without one does not count. Credentials and endpoints come from the environment alone.
"""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import fsspec

from trainers.run.errors import TrainingError
from trainers.run.log import without_secrets
from trainers.run.manifest import set_aside, verify

_MANIFEST = "manifest.json"
_STEP = re.compile(r"step-\d{8}")


def is_url(place: str) -> bool:
    """Whether a path is one for fsspec."""
    return "://" in place


class Mirror:
    """The copies at one URL. For rank 0 alone; one copy is under way at a time.

    Args:
        url: the folder of the copies.
        limit: how many to keep besides the best one.

    Raises:
        TrainingError: when it cannot be reached.
    """

    def __init__(self, url: str, limit: int):
        self.url, self.limit = url.rstrip("/"), limit
        self.thread: Thread | None = None
        self.lock = Lock()
        self.copying: tuple[Path, int | None] | None = None
        self.coming: tuple[Path, int | None] | None = None
        self.known: list[int] = []
        self.unreadable: set[int] = set()
        try:
            self.fs, root = fsspec.url_to_fs(self.url)
            self.root = str(root).rstrip("/")
        except Exception as error:
            raise self._unreachable(error) from None

    def check_writable(self) -> None:
        """Writes and removes a small file, before a GPU has worked for what could not be kept.

        Raises:
            TrainingError: when that fails.
        """
        probe = f"{self.root}/.tunesmith-{time.time_ns()}"
        try:
            self.fs.makedirs(self.root, exist_ok=True)
            self.fs.pipe_file(probe, b"writable")
            self.fs.rm_file(probe)
        except Exception as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> TrainingError:
        told = without_secrets(f"{type(error).__name__}: {error}".partition("\n")[0])
        return TrainingError(f"checkpoint_url={self.url} cannot be used: {told}; check URL, rights and credentials")

    def steps(self) -> list[int]:
        """The steps of whole copies, newest first.

        Raises:
            TrainingError: when the place cannot be read.
        """
        try:
            self.fs.invalidate_cache()
            names = [str(path).rstrip("/").rpartition("/")[2] for path in self.fs.ls(self.root, detail=False)]
            found = [name for name in names if _STEP.fullmatch(name)]
            whole = [name for name in found if self.fs.exists(f"{self.root}/{name}/{_MANIFEST}")]
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self._unreachable(error) from None
        self.known = sorted((int(name[5:]) for name in whole), reverse=True)
        return self.known

    def copy(self, folder: Path, best: int | None) -> None:
        """Copies a published checkpoint in the background; of those that wait for a slow place, the newest one.

        Args:
            folder: the checkpoint.
            best: step of the best one, which is kept.
        """
        with self.lock:
            self.coming = (folder, best)
            if self.thread is None:
                self.thread = Thread(target=self._work, name="mirror", daemon=True)
                self.thread.start()

    def copied(self, patience: float = 0.0) -> bool:
        """Whether nothing is left to copy.

        Args:
            patience: seconds to wait for it.
        """
        thread = self.thread
        if thread is not None:
            thread.join(patience)
        return self.thread is None

    def in_use(self) -> list[Path]:
        """The checkpoints that must stay here until they are copied."""
        with self.lock:
            return [pair[0] for pair in (self.copying, self.coming) if pair]

    def _work(self) -> None:
        while True:
            with self.lock:
                self.copying, self.coming = self.coming, None
                if self.copying is None:
                    self.thread = None
                    return
            self._copy(*self.copying)

    def _copy(self, folder: Path, best: int | None) -> None:
        """A copy that fails costs no run: the checkpoint itself stands, and the next one is copied again."""
        step, began = int(folder.name[5:]), time.perf_counter()
        there = f"{self.root}/{folder.name}"
        try:
            self._remove(step)
            self.fs.makedirs(there, exist_ok=True)
            files = sorted(path for path in folder.iterdir() if path.name != _MANIFEST)
            for path in [*files, folder / _MANIFEST]:
                self.fs.put_file(str(path), f"{there}/{path.name}")
            # Later ones are not touched: they could not be read, and a person may still want them.
            for old in [one for one in self.steps() if one <= step and one not in (step, best)][self.limit - 1 :]:
                self._remove(old)
        except Exception as error:
            told = without_secrets(f"{type(error).__name__}: {error}".partition("\n")[0])
            print(f"warning: {folder.name} could not be copied to {self.url}: {told}; it is kept here", flush=True)
        else:
            print(f"copied {folder.name} to {self.url} in {time.perf_counter() - began:.2f} s", flush=True)

    def _remove(self, step: int) -> None:
        """The manifest first, so that a copy that is half removed does not count."""
        there = f"{self.root}/step-{step:08d}"
        if not self.fs.exists(there):
            return
        if self.fs.exists(f"{there}/{_MANIFEST}"):
            self.fs.rm_file(f"{there}/{_MANIFEST}")
        self.fs.rm(there, recursive=True)

    def drop_after(self, step: int) -> None:
        """Removes the copies of later steps, but for those that could not be read: a person may still want them.

        Raises:
            TrainingError: when that fails.
        """
        while not self.copied(1.0):
            pass
        later = [one for one in self.steps() if one > step and one not in self.unreadable]
        try:
            for one in later:
                self._remove(one)
        except Exception as error:
            raise self._unreachable(error) from None

    def fetch_newer(self, than: int, checkpoints: Path) -> Path | None:
        """Brings the newest good copy of a step after `than` here; None when there is none.

        Raises:
            TrainingError: when the place cannot be read.
        """
        for step in [step for step in self.steps() if step > than]:
            if (found := self.fetch(step, checkpoints)) is not None:
                return found
        return None

    def fetch(self, step: int, checkpoints: Path) -> Path | None:
        """Brings the copy of a step here; None, and a line in the log, when it is bad.

        Raises:
            TrainingError: when the place cannot be read.
        """
        checkpoints.mkdir(exist_ok=True)  # without its parents: a run folder that was removed is not to come back
        try:
            return self._fetch(step, checkpoints)
        except ValueError as problem:
            self.unreadable.add(step)
            print(f"checkpoint {self.url}/step-{step:08d} is bad: {problem}; it is passed over", flush=True)
            return None
        except Exception as error:
            raise self._unreachable(error) from None

    def _fetch(self, step: int, checkpoints: Path) -> Path:
        name = f"step-{step:08d}"
        temporary, final = checkpoints / f"{name}.tmp-fetch", checkpoints / name
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            for entry in self.fs.ls(f"{self.root}/{name}", detail=False):
                file = str(entry).rstrip("/").rpartition("/")[2]
                self.fs.get_file(str(entry), str(temporary / file))
            verify(temporary)
            if final.exists():
                set_aside(final, "later")
            return temporary.rename(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def split_step(url: str) -> tuple[str, int | None]:
    """The folder of the copies and the step of `URL/step-00000010`; no step where the URL names the folder itself."""
    folder, _, name = url.rstrip("/").rpartition("/")
    number: Any = name.removeprefix("step-")
    return (folder, int(number)) if name != number and number.isdigit() else (url.rstrip("/"), None)
