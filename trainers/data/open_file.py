"""Opens a data file, wherever it lies and however it is stored. Imports no torch.

What only URLs and compressed files need is imported for them alone: it takes several MiB of every tokenising process.
"""

from __future__ import annotations

import io
from functools import partial
from typing import BinaryIO

from trainers.config.remote_data import is_url
from trainers.data.data_file import DataFile

_BLOCK = 1 << 20
"""Least bytes of a request."""


def open_file(file: DataFile, end: int | None = None) -> BinaryIO:
    """A data file for reading, decompressed; of a remote one, no byte from `end` on is fetched.

    Raises:
        OSError: if it cannot be read.
        ConfigError: if it is not what its suffix says.
    """
    if file.content_size is None:
        return open_stored(file, end)
    from trainers.data.packed import PackedFile

    return io.BufferedReader(PackedFile(file, partial(open_stored, file)), _BLOCK)


def open_stored(file: DataFile, end: int | None = None) -> BinaryIO:
    """A data file for reading, as it is stored.

    Raises:
        OSError: if it cannot be read.
    """
    if not is_url(file.path):
        return open(file.path, "rb")
    from trainers.data.remote_file import RemoteFile

    return io.BufferedReader(RemoteFile(file, end), _BLOCK)
