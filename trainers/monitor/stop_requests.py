"""Requests to stop or save that reach a rank while it trains."""

from __future__ import annotations

import os
import signal
from typing import Any

from trainers.parallel.ranks import Ranks
from trainers.run.folder import RunFolder
from trainers.run.launch import end_with_launcher


class Requests:
    """Requests from signals, from control files (read by rank 0), or implied by the death of the launcher.

    SIGTERM, SIGINT and SIGHUP request to save and stop, SIGUSR1 to save and continue.

    Args:
        run: the run whose control files rank 0 reads.
        is_main: whether this is rank 0.
        launcher: process id of this rank's parent.
    """

    def __init__(self, run: RunFolder, is_main: bool, launcher: int):
        self.run = run
        self.is_main = is_main
        self.launcher = launcher
        self.signal = ""
        self.save = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._stop)
        signal.signal(signal.SIGUSR1, self._save)
        end_with_launcher(False)  # `orphaned` detects its death from now on, and the run is saved first

    def _stop(self, number: int, frame: Any) -> None:
        self.signal = signal.Signals(number).name

    def _save(self, number: int, frame: Any) -> None:
        self.save = True

    def poll(self) -> tuple[bool, bool, bool]:
        """Whether to stop, whether to stop without saving (both stay true), and whether to save now (true once)."""
        saves = self.run.stop_asked() if self.is_main else None
        save_now, self.save = self.save or (self.is_main and self.run.take_save_request()), False
        return bool(self.signal) or saves is not None or self.orphaned(), saves is False, save_now

    def orphaned(self) -> bool:
        """Whether the launcher died: nothing else would end this rank, so it must end itself."""
        return os.getppid() != self.launcher

    def stopped_by(self, ranks: Ranks) -> str | None:
        """What has requested the stop, of any rank; None if it was the death of the launcher. Collective.

        A dead launcher is a failure, except after a signal: it may have received the signal too and exited first.
        """
        signals = ranks.gather(self.signal)
        if any(ranks.gather(self.orphaned())) and not any(signals):
            return None
        return next((f"{name} on rank {rank}" for rank, name in enumerate(signals) if name), self.run.stop_source())
