"""`torch.distributed.run` for `tunesmith doctor`: ends when the doctor is killed, and removes its folder then.

python -m trainers.tools.bound_launcher PARENT FOLDER [arguments of torch.distributed.run]
"""

from __future__ import annotations

import os
import shutil
import signal
import sys

from trainers.run.launch import end_with_launcher


def main() -> None:
    """Runs the launcher; on Linux, SIGTERM comes when the parent dies."""
    parent, folder, *arguments = sys.argv[1:]
    # Until torch sets its own handler, which ends the ranks too.
    signal.signal(signal.SIGTERM, lambda *signalled: sys.exit(128 + signal.SIGTERM))
    try:
        end_with_launcher(True)
        if os.getppid() == int(parent):  # else it was killed before it could be bound to
            from torch.distributed.run import main as launch

            launch(arguments)
    finally:
        if os.getppid() != int(parent):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
