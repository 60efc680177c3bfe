"""Copies of a run's checkpoints somewhere else: any place that fsspec knows, such as `s3://bucket/run`.

A machine that is taken away takes its disk along. Each published checkpoint is copied while training goes on, its
manifest last, so that a copy without one does not count. Credentials and endpoints come from the environment alone.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec

from trainers.errors import TrainingError
from trainers.log_tee import without_secrets
from trainers.manifest import set_aside, verify

_MANIFEST = "manifest.json"
_STEP = "step-" + "[0-9]" * 8


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
        self.copying: Path | None = None
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
            found = self.fs.glob(f"{self.root}/{_STEP}/{_MANIFEST}")
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self._unreachable(error) from None
        return sorted((int(str(path).rsplit("/", 2)[1][5:]) for path in found), reverse=True)

    def copy(self, folder: Path, best: int | None) -> None:
        """Begins to copy a published checkpoint, after the one before; returns at once where that is done.

        Args:
            folder: the checkpoint.
            best: step of the best one, which is kept.
        """
        self.wait()
        self.copying = folder
        self.thread = Thread(target=self._copy, args=(folder, best), name="mirror", daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Until the copy under way is there."""
        if self.thread is not None:
            self.thread.join()
        self.thread = self.copying = None

    def _copy(self, folder: Path, best: int | None) -> None:
        """A copy that fails costs no run: the checkpoint itself stands, and the next one is copied again."""
        there, began = f"{self.root}/{folder.name}", time.perf_counter()
        try:
            self._remove(int(folder.name[5:]))
            self.fs.makedirs(there, exist_ok=True)
            files = sorted(path for path in folder.iterdir() if path.name != _MANIFEST)
            for path in [*files, folder / _MANIFEST]:
                self.fs.put_file(str(path), f"{there}/{path.name}")
            for step in [step for step in self.steps() if step != best][self.limit :]:
                self._remove(step)
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
        """Removes the copies of later steps.

        Raises:
            TrainingError: when that fails.
        """
        self.wait()
        later = [one for one in self.steps() if one > step]
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
        try:
            return self._fetch(step, checkpoints)
        except ValueError as problem:
            print(f"checkpoint {self.url}/step-{step:08d} is bad: {problem}; it is passed over", flush=True)
            return None
        except Exception as error:
            raise self._unreachable(error) from None

    def _fetch(self, step: int, checkpoints: Path) -> Path:
        name = f"step-{step:08d}"
        temporary, final = checkpoints / f"{name}.tmp-fetch", checkpoints / name
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
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
