"""A Hub on loopback: serves folders of models and data as huggingface.co does, by ranges, counting what it sends."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import sleep
from typing import Any, TypeVar
from urllib.parse import parse_qs

import pytest
from huggingface_hub import constants

from trainers.data.tokenizer import _fetch

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Refusal = tuple[int, str, str]
"""Status, the Hub's code for it, and its words."""
GATED: Refusal = (403, "GatedRepo", "Access to model is restricted and you are not in the authorized list.")
NO_TOKEN: Refusal = (401, "GatedRepo", "Access to model is restricted. You must be authenticated to access it.")
NOT_FOUND: Refusal = (401, "RepoNotFound", "Repository not found")
BAD_TOKEN: Refusal = (401, "", "Invalid credentials in Authorization header")
BROKEN: Refusal = (500, "", "Internal Error")
LIMITED: Refusal = (429, "", "Too Many Requests")
NO_FILE: Refusal = (404, "EntryNotFound", "Entry not found")
NO_REVISION: Refusal = (404, "RevisionNotFound", "Revision not found")


class FakeHub:
    """What it serves and what was asked of it.

    Args:
        folder: with the files of `owner/NAME` in `NAME/`.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.refusals: dict[str, Refusal] = {}
        """Of paths that contain the text."""
        self.delay = 0.0
        """Seconds before each answer."""
        self.sent = Counter[str]()
        """Bytes of content by path in the repository."""
        self.private = set[str]()
        """Names of private repositories."""
        self.url = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answers a GET, HEAD or POST."""
        sleep(self.delay)
        path = handler.path.partition("?")[0]
        refusal = next((refusal for part, refusal in self.refusals.items() if part in path), None)
        info = re.fullmatch(r"/api/(?:models|datasets)/owner/([\w.-]+)(?:/revision/([\w.-]+))?", path)
        tree = re.fullmatch(r"/api/(?:models|datasets)/owner/([\w.-]+)/tree/([\w.-]+)(?:/(.+))?", path)
        paths = re.fullmatch(r"/api/(?:models|datasets)/owner/([\w.-]+)/paths-info/([\w.-]+)", path)
        file = re.fullmatch(r"(?:/datasets)?/owner/([\w.-]+)/resolve/([\w.-]+)/(.+)", path)
        matched = info or tree or paths or file
        name, revision = matched.groups()[:2] if matched else (None, None)
        if refusal is None and not (name and (self.folder / name).is_dir()):
            refusal = NOT_FOUND
        if refusal is None and revision not in (None, "main", COMMIT):
            refusal = NO_REVISION
        if refusal is None and file and not (self.folder / name / file[3]).is_file():
            refusal = NO_FILE
        if refusal is not None:
            self._send(handler, refusal[0], json.dumps({"error": refusal[2]}).encode(),
                       {"X-Error-Code": refusal[1], "X-Error-Message": refusal[2]})  # fmt: skip
        elif tree:
            root = self.folder / name
            entries = [self._entry(root, path) for path in sorted((root / (tree[3] or "")).iterdir())]
            self._send(handler, 200, json.dumps(entries).encode(), {"Content-Type": "application/json"})
        elif paths:
            size = int(handler.headers.get("Content-Length") or 0)
            wanted = parse_qs(handler.rfile.read(size).decode())["paths"]
            root = self.folder / name
            entries = [self._entry(root, root / path) for path in wanted if (root / path).exists()]
            self._send(handler, 200, json.dumps(entries).encode(), {"Content-Type": "application/json"})
        elif info:
            names = [{"rfilename": one.name} for one in sorted((self.folder / name).iterdir())]
            about = {
                "id": f"owner/{name}",
                "sha": COMMIT,
                "private": name in self.private,
                "tags": [],
                "siblings": names,
            }
            self._send(handler, 200, json.dumps(about).encode(), {"Content-Type": "application/json"})
        elif file:
            self._file(handler, self.folder / name / file[3])

    def _entry(self, root: Path, path: Path) -> dict[str, Any]:
        """What the Hub tells of a file or folder in a repository."""
        kind, size = ("file", path.stat().st_size) if path.is_file() else ("directory", 0)
        return {"type": kind, "oid": f"{size:040x}", "path": str(path.relative_to(root)), "size": size}

    def _file(self, handler: BaseHTTPRequestHandler, path: Path) -> None:
        content, status, headers = path.read_bytes(), 200, {"Accept-Ranges": "bytes", "X-Repo-Commit": COMMIT}
        headers["ETag"] = f'"{hashlib.sha256(content).hexdigest()}"'
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range") or "")
        if asked:
            first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        self._send(handler, status, content, headers)
        if handler.command == "GET":
            self.sent[path.name] += len(content)

    def _send(self, handler: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str]) -> None:
        handler.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            handler.send_header(key, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)


Hub = TypeVar("Hub", bound=FakeHub)


def use_hub(url: str, cache: Path, patch: pytest.MonkeyPatch) -> None:
    """Lets this process take a server for the Hub, with an empty cache; the environment is read only at the import."""
    files = url + "/{repo_id}/resolve/{revision}/{filename}"
    values = {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": files,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": False,
    }
    for name, value in values.items():
        patch.setattr(constants, name, value)
    patch.setattr("huggingface_hub.hf_api.api.endpoint", url)
    _fetch.cache_clear()


@contextmanager
def serve_hub(folder: Path, kind: type[Hub] = FakeHub) -> Iterator[Hub]:  # type: ignore[assignment]
    """A Hub that serves a folder until the end of the block."""
    hub = kind(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.answer(self)

        do_HEAD = do_POST = do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
