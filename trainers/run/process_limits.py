"""Limits on what a tokenizer and a chat template may cost; they come with a model, from anybody. Imports no torch.

Python raises MemoryError at a limit of memory; the tokenizers library, which is Rust, aborts the process, and nothing
stops it within a call. So what it does happens in child processes, whose death is told in a sentence.
"""

from __future__ import annotations

import math
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RENDER_BYTES = 2 << 30
TOKENIZER_BYTES = 4 << 30
"""For a tokenizer to load, and for a few rows; the largest vocabularies load in a quarter of it."""
LOAD_SECONDS = 120.0
_BYTES_PER_BYTE = 400
"""Of text: byte-level tokens of Chinese take 220."""
_SECONDS = 30.0
_SECONDS_PER_BYTE = 5e-5
"""Ten times what a byte-level tokenizer without a split into words takes."""
_SECONDS_PER_MESSAGE = 0.1
OUT_OF_MEMORY = 75
"""Exit status of a child in which Python ran out of memory."""


@contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """Lets the process take so many bytes more within the block; beyond that Python raises `MemoryError`.

    On Linux alone: elsewhere the system keeps to no such limit.
    """
    if sys.platform != "linux":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + size
    ceiling = min((value for value in (soft, hard) if value != resource.RLIM_INFINITY), default=limit)
    resource.setrlimit(resource.RLIMIT_AS, (min(limit, ceiling), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Has the system end this process (SIGXCPU) when the block takes more processor time, in all its threads."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = math.ceil(time.process_time() + seconds) + 1
    ceiling = min((value for value in (soft, hard) if value != resource.RLIM_INFINITY), default=limit)
    resource.setrlimit(resource.RLIMIT_CPU, (min(limit, ceiling), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def encoding_bytes(size: int) -> int:
    """Memory that a tokenizer may take for so many bytes of text."""
    return TOKENIZER_BYTES + _BYTES_PER_BYTE * size


def encoding_seconds(size: int, messages: int = 0) -> float:
    """Processor time that rendering and tokenising may take for so many bytes of text in so many messages."""
    return _SECONDS + _SECONDS_PER_BYTE * size + _SECONDS_PER_MESSAGE * messages


def expect_death() -> None:
    """Has this process leave no core file when it ends at a limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def at_a_limit(status: int, errors: str) -> str | None:
    """What a tokenizer or template took that ended its process at a limit; None when it died otherwise.

    Args:
        status: as `Popen.returncode` has it.
        errors: what the process wrote to standard error.
    """
    if status == -signal.SIGXCPU:
        return "takes too much processor time"
    if status == OUT_OF_MEMORY or (status != 0 and ("memory allocation of" in errors or "MemoryError" in errors)):
        return "takes too much memory"
    return None


def why_it_died(status: int, errors: str) -> str:
    """What a tokenizer or template did that ended its process; arguments as of `at_a_limit`."""
    if excess := at_a_limit(status, errors):
        return excess
    if status == -signal.SIGKILL:
        return "was ended by the system, perhaps for lack of memory"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = f": {lines[-1][:200]}" if lines else ""
    return f"crashes (status {status}{last})"
