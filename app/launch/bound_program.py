"""Becomes another program, which the kernel ends when the process that started it dies, killed or not.

`python -IS bound_program.py PARENT PROGRAM [ARGUMENT ...]` costs some 20 ms, as it imports
nothing of this project. `preexec_fn` could do the same, but not from a process with threads, such as the pages' server.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # it survives `exec`; see `man 2 prctl`


def main() -> None:
    """Asks the kernel for SIGTERM at the parent's death (Linux only), and becomes the program."""
    parent, *argv = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == int(parent):  # else it was killed before that
        os.execv(argv[0], argv)  # noqa: S606


if __name__ == "__main__":
    main()
