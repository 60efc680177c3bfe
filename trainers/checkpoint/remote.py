"""Copies of a run's checkpoints at any location that fsspec supports, such as `s3://bucket/run`.

A preempted machine loses its disk. Each published checkpoint is copied while training continues, its manifest last, so
that a copy without a manifest is incomplete. Credentials and endpoints come from the environment only.
"""

from __future__ import annotations

import errno
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
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def is_url(location: str) -> bool:
    """Whether a path is a URL for fsspec."""
    return "://" in location


class RemoteCopy:
    """The copies at one URL. For rank 0 only; copies one checkpoint at a time.

    Args:
        url: the folder of the copies.
        limit: number of copies to keep besides the best one.

    Raises:
        TrainingError: if the URL cannot be used.
    """

    def __init__(self, url: str, limit: int):
        self.url = url.rstrip("/")
        self.limit = limit
        self.thread: Thread | None = None
        self.lock = Lock()
        self.copying: tuple[Path, int | None] | None = None
        self.queued: tuple[Path, int | None] | None = None
        self.known: list[int] = []
        self.unreadable: set[int] = set()
        try:
            self.fs, root = fsspec.url_to_fs(self.url)
            self.root = str(root).rstrip("/")
        except Exception as error:
            raise self._unreachable(error) from None

    def check_writable(self) -> None:
        """Writes and removes a small file, so that a run fails before it trains what it could not save.

        Raises:
            TrainingError: if that fails.
        """
        probe = f"{self.root}/.tunesmith-{time.time_ns()}"
        try:
            self.fs.makedirs(self.root, exist_ok=True)
            self.fs.pipe_file(probe, b"writable")
            self.fs.rm_file(probe)
        except Exception as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> TrainingError:
        message = without_secrets(f"{type(error).__name__}: {error}".partition("\n")[0])
        return TrainingError(
            f"checkpoint_url={self.url} cannot be used: {message}; check the URL, permissions and credentials"
        )

    def steps(self) -> list[int]:
        """The steps of complete copies, newest first.

        Raises:
            TrainingError: if the URL cannot be read.
        """
        try:
            self.fs.invalidate_cache()
            names = [str(path).rstrip("/").rpartition("/")[2] for path in self.fs.ls(self.root, detail=False)]
            folders = [name for name in names if _STEP.fullmatch(name)]
            complete = [name for name in folders if self.fs.exists(f"{self.root}/{name}/{_MANIFEST}")]
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self._unreachable(error) from None
        self.known = sorted((int(name[5:]) for name in complete), reverse=True)
        return self.known

    def copy(self, folder: Path, best: int | None) -> None:
        """Copies a published checkpoint in the background; if several wait for a slow URL, only the newest is copied.

        Args:
            folder: the checkpoint.
            best: step of the best checkpoint, which is never pruned.
        """
        with self.lock:
            self.queued = (folder, best)
            if self.thread is None:
                self.thread = Thread(target=self._work, name="mirror", daemon=True)
                self.thread.start()

    def copied(self, timeout: float = 0.0) -> bool:
        """Whether nothing is left to copy.

        Args:
            timeout: seconds to wait for it.
        """
        thread = self.thread
        if thread is not None:
            thread.join(timeout)
        return self.thread is None

    def in_use(self) -> list[Path]:
        """The checkpoints that must stay on disk until they are copied."""
        with self.lock:
            return [pair[0] for pair in (self.copying, self.queued) if pair]

    def _work(self) -> None:
        while True:
            with self.lock:
                self.copying, self.queued = self.queued, None
                if self.copying is None:
                    self.thread = None
                    return
            self._copy(*self.copying)

    def _copy(self, folder: Path, best: int | None) -> None:
        """Copies one checkpoint. A failure only warns: the checkpoint itself is safe, and the next one is copied."""
        step, began = int(folder.name[5:]), time.perf_counter()
        target = f"{self.root}/{folder.name}"
        try:
            # Replace any older copy of the step; the manifest goes last and so marks the copy as complete.
            self._remove(step)
            self.fs.makedirs(target, exist_ok=True)
            files = sorted(path for path in folder.iterdir() if path.name != _MANIFEST)
            for path in [*files, folder / _MANIFEST]:
                self.fs.put_file(str(path), f"{target}/{path.name}")
            # Prune old copies. Later ones could not be read, and are kept, as the user may still want them.
            for old in [copied for copied in self.steps() if copied <= step and copied not in (step, best)][
                self.limit - 1 :
            ]:
                self._remove(old)
        except Exception as error:
            message = without_secrets(f"{type(error).__name__}: {error}".partition("\n")[0])
            print(
                f"warning: {folder.name} could not be copied to {self.url}: {message}; the local checkpoint is kept",
                flush=True,
            )
        else:
            print(f"copied {folder.name} to {self.url} in {time.perf_counter() - began:.2f} s", flush=True)

    def _remove(self, step: int) -> None:
        """Removes a copy, its manifest first, so that a partly removed copy counts as incomplete."""
        target = f"{self.root}/step-{step:08d}"
        if not self.fs.exists(target):
            return
        if self.fs.exists(f"{target}/{_MANIFEST}"):
            self.fs.rm_file(f"{target}/{_MANIFEST}")
        self.fs.rm(target, recursive=True)

    def drop_after(self, step: int) -> None:
        """Removes the copies of later steps, except those that could not be read, which the user may still want.

        Raises:
            TrainingError: if that fails.
        """
        while not self.copied(1.0):
            pass
        later = [later_step for later_step in self.steps() if later_step > step and later_step not in self.unreadable]
        try:
            for later_step in later:
                self._remove(later_step)
        except Exception as error:
            raise self._unreachable(error) from None

    def fetch_newer(self, than: int, checkpoints: Path) -> Path | None:
        """Downloads the newest valid copy of a step after `than`; None if there is none.

        Raises:
            TrainingError: if the URL cannot be read.
        """
        for step in [step for step in self.steps() if step > than]:
            if (path := self.fetch(step, checkpoints)) is not None:
                return path
        return None

    def fetch(self, step: int, checkpoints: Path) -> Path | None:
        """Downloads the copy of a step; logs a line and returns None if it is bad.

        Raises:
            TrainingError: if the URL cannot be read.
        """
        checkpoints.mkdir(exist_ok=True)  # without its parents: a removed run folder must not reappear
        try:
            return self._fetch(step, checkpoints)
        except ValueError as problem:
            self.unreadable.add(step)
            print(f"checkpoint {self.url}/step-{step:08d} is bad: {problem}; skipped", flush=True)
            return None
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _DISK_FULL:
                raise TrainingError(
                    f"{checkpoints} has no room for the copy of step {step}: {error.strerror}; free some space"
                ) from None
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
    """Splits `URL/step-00000010` into folder and step; the step is None if the URL names the folder itself."""
    folder, _, name = url.rstrip("/").rpartition("/")
    number: Any = name.removeprefix("step-")
    return (folder, int(number)) if name != number and number.isdigit() else (url.rstrip("/"), None)
