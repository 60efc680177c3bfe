"""A disk of a few megabytes that can be filled, and folders in which nothing can be written, root or not."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path

from trainers.run.folder import RunFolder


def mount(*words: str) -> bool:
    return shutil.which("mount") is not None and subprocess.run(["mount", *words], capture_output=True).returncode == 0


def mounted(folder: Path) -> bool:
    """`os.path.ismount` does not see a folder that is mounted on itself."""
    mounts = Path("/proc/self/mountinfo")
    return mounts.exists() and any(line.split()[4] == str(folder) for line in mounts.read_text().splitlines())


def unmount(folder: Path) -> None:
    while mounted(folder):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class SmallDisk:
    """The folder of a run's folder on a disk of its own, where this user may mount one.

    Elsewhere a full disk is a limit on the size of what the run's ranks write, and `kind` is `limit`.
    """

    def __init__(self, folder: Path):
        folder.mkdir(exist_ok=True)
        self.folder, self.filler = folder, folder / "filler"
        self.kind = "tmpfs" if mount("-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)) else "limit"

    def fill(self, run: RunFolder, left: int) -> None:
        """Leaves so many bytes free."""
        if self.kind == "limit":
            for process in run.processes():
                if process.role == "rank":
                    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (2**16, 2**16))
            return
        space = os.statvfs(self.folder)
        with open(self.filler, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - left)

    def make_room(self) -> None:
        self.filler.unlink(missing_ok=True)  # a limit ended with its processes


def forbid_writing(folder: Path) -> None:
    """For root by a read-only mount of the folder on itself: it may write whatever the mode says."""
    if os.geteuid() != 0:
        folder.chmod(0o555)
    elif not (mount("--bind", str(folder), str(folder)) and mount("-o", "remount,bind,ro", str(folder))):
        unmount(folder)
        subprocess.run(["chattr", "+i", str(folder)], check=True)


def allow_writing(folder: Path) -> None:
    if os.geteuid() != 0:
        folder.chmod(0o755)
    elif mounted(folder):
        unmount(folder)
    else:
        subprocess.run(["chattr", "-i", str(folder)], check=True)
