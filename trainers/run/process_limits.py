"""Limits on time and memory of tokenizers and chat templates, which come with untrusted models; and on open files.

At a memory limit, Python raises MemoryError, but the tokenizers library, written in Rust, aborts the process, and its
calls cannot be interrupted. It therefore runs in child processes, whose death is reported in one sentence. Imports no
torch.
"""

from __future__ import annotations

import contextlib
import math
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

RENDER_BYTES = 2 << 30
TOKENIZER_BYTES = 4 << 30
"""For loading a tokenizer and encoding a few rows; the largest vocabularies load in a quarter of it."""
LOAD_SECONDS = 120.0
_BYTES_PER_BYTE = 400
"""Memory per byte of text; byte-level tokens of Chinese text take 220."""
_SECONDS = 30.0
_SECONDS_PER_BYTE = 5e-5
"""Ten times what a byte-level tokenizer without pre-tokenization takes."""
_SECONDS_PER_MESSAGE = 0.1
OUT_OF_MEMORY = 75
"""Exit status of a child in which Python ran out of memory."""


@contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """Limits additional memory within the block to `size` bytes; beyond that, Python raises `MemoryError`.

    Linux only: other systems do not enforce the limit.
    """
    if sys.platform != "linux":
        yield
        return
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    with _lowered(resource.RLIMIT_AS, pages * resource.getpagesize() + size):
        yield


def time_limit(seconds: float) -> AbstractContextManager[None]:
    """Has the kernel end this process (SIGXCPU) if the block takes more CPU time, summed over threads.

    Args:
        seconds: CPU time allowed for the block.
    """
    return _lowered(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds) + 1)


@contextmanager
def _lowered(kind: int, limit: int) -> Iterator[None]:
    """Sets a soft limit within the block, but does not raise it."""
    soft, hard = resource.getrlimit(kind)
    ceiling = min((value for value in (soft, hard) if value != resource.RLIM_INFINITY), default=limit)
    resource.setrlimit(kind, (min(limit, ceiling), hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def encoding_bytes(size: int) -> int:
    """Returns the bytes of memory that a tokenizer may use for `size` bytes of text."""
    return TOKENIZER_BYTES + _BYTES_PER_BYTE * size


def encoding_seconds(size: int, messages: int = 0) -> float:
    """Returns the CPU seconds that rendering and tokenizing `size` bytes of text in `messages` messages may take."""
    return _SECONDS + _SECONDS_PER_BYTE * size + _SECONDS_PER_MESSAGE * messages


def open_more_files() -> None:
    """Raises the limit of files that this process may have open, as far as it may be raised."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems have a lower one that they do not tell
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def expect_death() -> None:
    """Disables core dumps for this process, which may be ended at a limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def at_a_limit(status: int, errors: str) -> str | None:
    """Returns which limit of a tokenizer or template ended its process; None if it died otherwise.

    Args:
        status: Exit status, as in `Popen.returncode`.
        errors: Standard error of the process.
    """
    if status == -signal.SIGXCPU:
        return "takes too much processor time"
    if status == OUT_OF_MEMORY or (status != 0 and ("memory allocation of" in errors or "MemoryError" in errors)):
        return "takes too much memory"
    return None


def why_it_died(status: int, errors: str) -> str:
    """Returns why the process of a tokenizer or template died; arguments as for `at_a_limit`."""
    if excess := at_a_limit(status, errors):
        return excess
    if status == -signal.SIGKILL:
        return "was ended by the system, perhaps for lack of memory"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = f": {lines[-1][:200]}" if lines else ""
    return f"crashes (status {status}{last})"
