"""What a rank is asked to do while it trains."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

from trainers.startup import end_with_launcher

if TYPE_CHECKING:
    from trainers.loop import Job


class Requests:
    """What this rank was asked to do: by a signal, by a control file (seen by rank 0), or by its launcher's death.

    SIGTERM, SIGINT and SIGHUP ask to save and stop, SIGUSR1 to save and go on.
    """

    def __init__(self, job: Job):
        self.job, self.signal, self.save = job, "", False
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
        run, main = self.job.run, self.job.ranks.is_main
        saves = run.stop_asked() if main else None
        save_now, self.save = self.save or (main and run.take_save_request()), False
        return bool(self.signal) or saves is not None or self.orphaned(), saves is False, save_now

    def orphaned(self) -> bool:
        """True when the launcher died: nobody would end this rank, so it must end itself."""
        return os.getppid() != self.job.launcher
