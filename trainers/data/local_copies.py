"""Local copies of data that is compressed, in a tar, behind a URL or in a database. Imports no torch.

A copy holds the file's content, or JSONL (of a tar, or of a query), and is read like any other file: a row is the same
however it was stored, and a bad row has its line. Copies are in the cache folder, named by source and content.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlsplit

from filelock import FileLock

from trainers.config.byte_text import byte_text
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.remote_data import DATA_SUFFIXES
from trainers.data.archives import Content, lines_of_tar
from trainers.data.progress import say
from trainers.data.queries import lines_of_query
from trainers.run.folder import cache_folder
from trainers.run.log import without_secrets

VERSIONS = ("ETag", "etag", "Last-Modified", "LastModified", "last_modified", "mtime", "updated", "blob_id")
"""What file systems call a property of a file that changes with its content."""
_CONNECT, _READ = 30.0, 120.0  # seconds without an answer


@dataclass(frozen=True)
class Copy:
    """A local file.

    Attributes:
        path: Absolute path.
        suffix: Suffix of its content, such as `.jsonl`.
        digest: sha256 of its content.
    """

    path: str
    suffix: str
    digest: str


def cache_dir(config: TrainConfig) -> Path:
    """The cache folder of tokenised data and of copies."""
    if config.cache_dir is not None:
        return Path(config.cache_dir).expanduser().absolute()
    return cache_folder()


def copy_of_file(path: Path, display_name: str, cache: Path) -> Copy:
    """The content of a compressed file, or the rows of a tar; made anew when the file has changed.

    Raises:
        ConfigError: If it is not what its suffix says, or there is no room for the copy.
    """
    status = path.stat()
    version = [os.path.realpath(path), status.st_size, status.st_mtime_ns]
    return _copy(cache, str(path.absolute()), version, path.name, lambda _: path, display_name)


@lru_cache(maxsize=256)
def copy_of_url(url: str, option: str, cache: Path) -> Copy:
    """The content of a URL as it is when this process first needs it; downloaded if it has changed since the last time.

    A server that gives neither an ETag nor a time is asked for the content.

    Args:
        url: The URL of a file.
        option: Name of the option.
        cache: The cache folder.

    Raises:
        ConfigError: If it cannot be downloaded, or is not what its suffix says.
    """
    with explained(url, option):
        files, remote = file_system(url)
        info = files.info(remote)
    name, size = PurePath(urlsplit(url).path).name, info.get("size")
    refuse_other_content(url, option, info, name)
    versions = [str(info[key]) for key in VERSIONS if info.get(key)]

    def download(target: Path) -> Path:
        say(f"downloading {url}" + (f" ({byte_text(size)})" if size else ""))
        with explained(url, option):
            files.get_file(remote, str(target))
        if size and target.stat().st_size != size:
            problem = f"ended after {target.stat().st_size:,} of {size:,} bytes"
            raise ConfigError.about(option, url, problem, "start again")
        return target

    return _copy(cache, url, [url, size, *versions] if versions else None, name, download, url)


@lru_cache(maxsize=16)
def copy_of_query(url: str, query: str, cache: Path) -> Copy:
    """The rows of a database's answer as JSONL; each process asks once.

    Raises:
        ConfigError: If the database cannot be asked, or gives values that JSON does not have.
    """
    with _workplace(cache, f"{url}\n{query}") as workplace:
        return _store(workplace, ".jsonl", lines_of_query(url, query))


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it; never a cached one, which would answer with what it was."""
    import fsspec

    options: dict[str, Any] = {}
    if url.partition("://")[0].lower() in ("http", "https"):
        import aiohttp

        # The default limits a whole download to five minutes.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT, sock_read=_READ)
        options = {"client_kwargs": {"timeout": timeout, "trust_env": True}}
    return fsspec.url_to_fs(url, skip_instance_cache=True, **options)


def refuse_other_content(url: str, option: str, info: dict[str, Any], name: str) -> None:
    final = str(info.get("url") or url)
    if url.lower().startswith("https:") and final.lower().startswith("http:"):
        problem = f"redirects to {final.partition('?')[0]}, which is not encrypted"
        raise ConfigError.about(option, url, problem, "name a URL that stays with https")
    if info.get("type") == "directory":
        raise ConfigError.about(option, url, "is a folder", "name each of its files, as sources of a mix")
    if info.get("mimetype") == "text/html":
        raise ConfigError.about(option, url, "is a web page", "name the URL of the file itself")


@contextmanager
def explained(url: str, option: str) -> Iterator[None]:
    """Raises `ConfigError` for what file systems raise, which differs from one to the next."""
    try:
        yield
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError.about(option, url, f"needs a package: {error}", "install it") from None
    except Exception as error:
        cause = error.__cause__ or error  # of HTTP, any failure is a FileNotFoundError at first
        status = getattr(cause, "status", None)
        reason = without_secrets(f"{type(cause).__name__}: {cause}".partition("\n")[0])[:300]
        if status in (401, 403) or isinstance(cause, PermissionError) or "Credentials" in reason:
            remedy = "check the permissions, and set credentials in the environment"
            raise ConfigError.about(option, url, f"may not be read ({status or reason})", remedy) from None
        if status in (404, 410) or isinstance(cause, FileNotFoundError):
            raise ConfigError.about(option, url, "does not exist", "check the URL") from None
        raise ConfigError.about(option, url, f"cannot be downloaded: {reason}", "check the URL and network") from None


def _copy(
    cache: Path, source: str, version: list[Any] | None, name: str, fetch: Callable[[Path], Path], display_name: str
) -> Copy:
    """The copy of a version of a file, from the cache if possible.

    Args:
        cache: The cache folder.
        source: Path or URL.
        version: What changes with the content; None if nothing does.
        name: Name of the file.
        fetch: Returns the path of the file, to which it may have been downloaded: the one that it is called with.
        display_name: The file in messages.
    """
    with _workplace(cache, source) as workplace:
        index = workplace.parent / f"{_digest(json.dumps(version))[:32]}.json" if version else None
        if index and (known := _known(index)):
            return known
        with Content(fetch(workplace / "fetched"), name, display_name) as content:
            if content.suffix not in DATA_SUFFIXES:
                problem = f"holds a file that ends in {content.suffix!r}" if content.suffix else "has no suffix"
                raise ConfigError(f"{display_name} {problem}; it needs one of {', '.join(DATA_SUFFIXES)}")
            in_tar = content.suffix == ".tar"
            pieces = lines_of_tar(content) if in_tar else content.pieces()
            copy = _store(workplace, ".jsonl" if in_tar else content.suffix, pieces)
        if index:
            (workplace / "index").write_text(json.dumps(asdict(copy)))
            (workplace / "index").replace(index)
        return copy


def _known(index: Path) -> Copy | None:
    try:
        copy = Copy(**json.loads(index.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return copy if os.path.isfile(copy.path) else None


def _store(workplace: Path, suffix: str, pieces: Iterable[bytes]) -> Copy:
    """Writes a copy, and publishes it beside the workplace under its final name once it is complete.

    An equal one stays as it is: another process may be streaming it, and watches for changes.
    """
    digest = hashlib.sha256()
    with (workplace / "copy").open("wb") as target:
        for piece in pieces:
            digest.update(piece)
            target.write(piece)
    path = workplace.with_name(f"{workplace.stem}-{digest.hexdigest()[:32]}{suffix}")
    if not path.is_file() or path.stat().st_size != (workplace / "copy").stat().st_size:
        (workplace / "copy").replace(path)
    return Copy(str(path), suffix, digest.hexdigest())


@contextmanager
def _workplace(cache: Path, source: str) -> Iterator[Path]:
    """An empty folder for one source, which no other process has at the same time; removed in the end.

    Raises:
        ConfigError: If it cannot be written to.
    """
    workplace = cache / "sources" / f"{_digest(source)[:16]}.partial"
    try:
        workplace.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(workplace.with_suffix(".lock")):
            shutil.rmtree(workplace, ignore_errors=True)  # of a process that was killed
            workplace.mkdir()
            try:
                yield workplace
            finally:
                shutil.rmtree(workplace, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot copy the data to {workplace.parent}: {reason}; free space there, or set cache_dir"
        ) from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
