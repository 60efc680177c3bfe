"""A file at a URL, read in place. Credentials and endpoints come from the environment only. Imports no torch."""

from __future__ import annotations

import io
import time
from typing import Any

from trainers.data.data_file import DataFile
from trainers.data.local_copies import file_system
from trainers.run.log import without_secrets

_WAITS = (1.0, 4.0, 16.0)
"""Seconds before a request that failed is sent again."""


def _is_final(error: Exception) -> bool:
    """Whether the same request would fail again: what is missing or forbidden, or a server that sends no ranges."""
    refused = getattr(error, "status", None) in (401, 403, 404, 410, 416)
    return refused or isinstance(error, FileNotFoundError | PermissionError | ValueError)


class RemoteFile(io.RawIOBase):
    """A file at a URL, which fetches exactly the ranges that are read; a request that fails is sent a few times more.

    Args:
        file: its `path` is a URL.
        end: where reading ends; None for its end.

    Raises:
        OSError: whatever its file system raises.
    """

    def __init__(self, file: DataFile, end: int | None = None):
        self._end = file.size if end is None else end
        fs, path = file_system(file.path)
        self._file: Any = self._try(lambda: fs.open(path, "rb", cache_type="none", size=file.size))

    def _try(self, request: Any) -> Any:
        for wait in (*_WAITS, None):
            try:
                return request()
            except Exception as error:  # each file system has errors of its own
                if wait is None or _is_final(error):
                    raise OSError(without_secrets(str(error) or type(error).__name__)) from None
                time.sleep(wait)

    def readinto(self, buffer: Any) -> int:
        """Reads from the current position."""
        start = self._file.tell()
        length = max(0, min(len(buffer), self._end - start))

        def request() -> bytes:
            self._file.seek(start)
            content: bytes = self._file.read(length) if length else b""
            return content

        content = self._try(request)
        buffer[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Changes the position."""
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        """The current position."""
        return int(self._file.tell())

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def close(self) -> None:
        """Closes the connection."""
        if not self.closed:
            self._file.close()
        super().close()
