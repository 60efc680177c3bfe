"""What a rank is asked to do while it trains."""

from __future__ import annotations

import os
import signal
from typing import Any

from trainers.run.folder import RunFolder
from trainers.run.launch import end_with_launcher


class Requests:
    """What this rank was asked to do: by a signal, by a control file (seen by rank 0), or by its launcher's death.

    SIGTERM, SIGINT and SIGHUP ask to save and stop, SIGUSR1 to save and go on.

    Args:
        run: whose control files rank 0 reads.
        is_main: whether this is rank 0.
        launcher: process id of this rank's parent.
    """

    def __init__(self, run: RunFolder, is_main: bool, launcher: int):
        self.run, self.is_main, self.launcher = run, is_main, launcher
        self.signal, self.save = "", False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._stop)
        signal.signal(signal.SIGUSR1, self._save)
        end_with_launcher(False)  # from here on `orphaned` sees it, and the run is saved first

    def _stop(self, number: int, frame: Any) -> None:
        self.signal = signal.Signals(number).name

    def _save(self, number: int, frame: Any) -> None:
        self.save = True

    def asked(self) -> tuple[bool, bool, bool]:
        """Whether to stop, whether to stop without saving (both stay true), and whether to save now (told once)."""
        saves = self.run.stop_asked() if self.is_main else None
        save_now, self.save = self.save or (self.is_main and self.run.take_save_request()), False
        return bool(self.signal) or saves is not None or self.orphaned(), saves is False, save_now

    def orphaned(self) -> bool:
        """True when the launcher died: nobody would end this rank, so it must end itself."""
        return os.getppid() != self.launcher
