"""Data files that are read where they lie: local paths, URLs that fsspec reads, and the files of Hub data sets.

Credentials and endpoints come from the environment only. Imports no torch.
"""

from __future__ import annotations

import io
import os
import time
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data.files import KINDS, DataFile, hub_mistake, looks_like_hub_id, resolve
from trainers.data.folders import files_of_split
from trainers.run.log import without_secrets

_BLOCK = 1 << 20
"""Least bytes of a request."""
_WAITS = (1.0, 4.0, 16.0)
"""Seconds before a request that failed is sent again."""
_VERSIONS = ("ETag", "etag", "blob_id", "sha256", "md5Hash", "Content-MD5", "Last-Modified", "LastModified", "mtime")
"""What file systems call the version of a file; the first that is there counts."""


def files_in_place(config: TrainConfig) -> list[DataFile]:
    """The files of the training data, of which none is downloaded.

    Raises:
        ConfigError: if the data does not exist or cannot be listed.
    """
    name, option = str(config.dataset_name), "dataset_name"
    if "://" in name:
        return _files_at(name, config.dataset_split, option)
    if not os.path.lexists(Path(name).expanduser()) and looks_like_hub_id(name):
        return _files_on_hub(name, config.dataset_config_name, config.dataset_split, option)
    return resolve(config, "train")


def _files_on_hub(name: str, config_name: str | None, split: str, option: str) -> list[DataFile]:
    """The files of a Hub data set, each by a URL with its revision."""
    from datasets import load_dataset_builder

    try:
        data_files: Any = load_dataset_builder(name, config_name).config.data_files
        urls = list((data_files or {})[split])
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ConfigError(hub_mistake(name, config_name, split, option, error)) from None
    return [_file_at(url, f"{name}/{url.partition('@')[2].partition('/')[2] or url}", option) for url in urls]


def _files_at(url: str, split: str, option: str) -> list[DataFile]:
    """The files at a URL: one, those of a pattern, or those of a split below a folder."""
    import fsspec

    label = without_secrets(url)
    try:
        fs, path = fsspec.url_to_fs(url)
        is_pattern = any(letter in path for letter in "*?[")
        if url.startswith(("http://", "https://")) or not (is_pattern or fs.isdir(path)):
            return [_file_at(url, label, option)]
        paths = sorted(fs.glob(path) if is_pattern else fs.find(path))
    except ConfigError:
        raise
    except Exception as error:
        raise _unreachable(option, label, error) from None
    names = [name for name in paths if PurePosixPath(name).suffix.lower() in KINDS]
    if not names:
        raise ConfigError(f"{option}={label} has no data file; it needs files ending in {', '.join(KINDS)}")
    chosen = files_of_split(names, split, label, "dataset_split", explicit=is_pattern).names
    return [_file_at(fs.unstrip_protocol(name), name, option) for name in chosen]


def _file_at(url: str, label: str, option: str) -> DataFile:
    import fsspec

    if os.path.isabs(url):  # a data set on disk
        return DataFile(url, label, PurePosixPath(url).name, _kind(url, label, option), os.path.getsize(url))
    kind = _kind(url.partition("?")[0], label, option)
    try:
        fs, path = fsspec.url_to_fs(url)
        facts = fs.info(path)
    except Exception as error:
        raise _unreachable(option, label, error) from None
    version = next((str(facts[name]) for name in _VERSIONS if facts.get(name)), "")
    if not facts.get("size") or not version:
        missing = "size" if not facts.get("size") else "version (ETag or Last-Modified)"
        raise ConfigError(f"{option}={label}: the server does not tell the {missing} of the file; download it")
    return DataFile(url, label, PurePosixPath(url).name, kind, int(facts["size"]), version=version)


def _kind(path: str, label: str, option: str) -> str:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix not in KINDS:
        known = ", ".join(KINDS)
        raise ConfigError(f"{option}: {label} ends in {suffix or 'nothing'!r}, and files are read in place if they end "
                          f"in one of {known}; leave out dataset_streaming, or convert it")  # fmt: skip
    return KINDS[suffix]


def _unreachable(option: str, label: str, error: Exception) -> ConfigError:
    if isinstance(error, FileNotFoundError):
        return ConfigError(f"{option}={label} does not exist, or its server is out of reach; check the URL")
    reason = without_secrets(str(error).partition("\n")[0][:200] or type(error).__name__)
    return ConfigError(f"{option}={label} cannot be read: {reason}; check the URL, and credentials in the environment")


def open_file(file: DataFile) -> BinaryIO:
    """A data file for reading from start to end, wherever it lies.

    Raises:
        OSError: if it cannot be read.
    """
    return io.BufferedReader(RemoteFile(file), _BLOCK) if "://" in file.path else open(file.path, "rb")


class RemoteFile(io.RawIOBase):
    """A file at a URL, which fetches exactly the ranges that are read; a request that fails is sent a few times more.

    Args:
        file: its `path` is a URL.

    Raises:
        OSError: whatever its file system raises.
    """

    def __init__(self, file: DataFile):
        import fsspec

        fs, path = fsspec.url_to_fs(file.path)
        self._file: Any = self._try(lambda: fs.open(path, "rb", cache_type="none", size=file.size))

    def _try(self, request: Any) -> Any:
        for wait in (*_WAITS, None):
            try:
                return request()
            except FileNotFoundError:
                raise
            except Exception as error:  # each file system has errors of its own
                if wait is None:
                    raise OSError(without_secrets(str(error) or type(error).__name__)) from None
                time.sleep(wait)

    def readinto(self, buffer: Any) -> int:
        """Reads from the current position."""
        start = self._file.tell()

        def request() -> bytes:
            self._file.seek(start)
            content: bytes = self._file.read(len(buffer))
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
