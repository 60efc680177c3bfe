"""A Hub on loopback that takes uploads too: repositories, Git LFS and commits, as huggingface_hub speaks to it.

Without Xet, whose storage has a protocol of its own: its clients run with HF_HUB_DISABLE_XET=1.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.fake_hub import FakeHub

_BLOCK = 1 << 16
_AT_REVISION = re.compile(r"/owner/([\w.-]+)/(revision|tree|paths-info|resolve)/([\w.-]+)")


def digest(content: bytes, lfs: bool) -> str:
    """The id of a file's content: its sha256 in Git LFS, otherwise that of a Git blob."""
    if lfs:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324 - Git's


class ReceivingHub(FakeHub):
    """What it has received.

    Args:
        folder: with the files of `owner/NAME` in `NAME/`; of another branch in `NAME--BRANCH/`.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.received = Counter[str]()
        """Bytes of content of Git LFS that came, by sha256, those of interrupted uploads included."""
        self.requests: list[str] = []
        """Method and path."""
        self.tokens = set[str | None]()
        """What requests authorise themselves with; uploads of content do so by their address."""
        self.forgetful = False
        """Whether it asks for content again that it has."""
        self.ignored = set[str]()
        """Files that a .gitignore in the repository names."""
        self.held: str | None = None
        """sha256 of content of which it reads a first part only, until `goes_on`."""
        self.goes_on = threading.Event()
        self.objects: dict[str, bytes] = {}
        self.places: dict[str, str] = {}
        """Folder by branch or commit."""
        self._lock = threading.Lock()

    def make(self, name: str, private: bool, **files: bytes) -> Path:
        """Makes a repository."""
        root = self.folder / name
        root.mkdir()
        self.private |= {name} if private else set()
        for path, content in {".gitattributes": b"", **files}.items():
            (root / path).write_bytes(content)
        return root

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.partition("?")[0]
        self.requests.append(f"{handler.command} {path}")
        if handler.command == "PUT":
            return self._take(handler, path.rpartition("/")[2])
        self.tokens.add(handler.headers.get("Authorization"))
        known = _AT_REVISION.search(path)
        if known and f"{known[1]} {known[3]}" in self.places:
            alias = self.places[f"{known[1]} {known[3]}"]
            handler.path = handler.path.replace(known[0], f"/owner/{alias}/{known[2]}/main")
        routes = {
            r"/api/repos/create": self._create, r"/api/validate-yaml": lambda *_: (200, {}),
            r"/api/models/owner/([\w.-]+)/preupload/([\w.-]+)": self._preupload,
            r"/api/models/owner/([\w.-]+)/branch/([\w.-]+)": self._branch,
            r"/api/models/owner/([\w.-]+)/commit/([\w.-]+)": self._commit,
            r"/owner/([\w.-]+).git/info/lfs/objects/batch": self._batch,
        }  # fmt: skip
        refused = any(part in path for part in self.refusals)
        for pattern, route in routes.items():
            if handler.command == "POST" and not refused and (match := re.fullmatch(pattern, path)):
                body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
                status, document = route(body, *match.groups())
                headers = {"Content-Type": "application/json"}
                return self._send(handler, status, json.dumps(document).encode(), headers)
        if refused and handler.command == "POST":
            handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        super().answer(handler)

    def _entry(self, root: Path, path: Path) -> dict[str, Any]:
        entry = super()._entry(root, path)
        if path.is_file() and self._is_lfs(path.name):
            content = path.read_bytes()
            entry["lfs"] = {"oid": digest(content, True), "size": len(content), "pointerSize": 134}
        return entry

    def _is_lfs(self, name: str) -> bool:
        return name.endswith(".safetensors")

    def _place(self, name: str, revision: str) -> Path:
        return self.folder / self.places.get(f"{name} {revision}", name)

    def _create(self, body: bytes) -> tuple[int, Any]:
        wanted = json.loads(body)
        if (self.folder / wanted["name"]).exists():
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/owner/{wanted['name']}"}
        self.make(wanted["name"], wanted.get("visibility") == "private")
        return 200, {"url": f"{self.url}/owner/{wanted['name']}"}

    def _branch(self, body: bytes, name: str, branch: str) -> tuple[int, Any]:
        if f"{name} {branch}" in self.places:
            return 409, {"error": "Reference already exists"}
        self.places[f"{name} {branch}"] = f"{name}--{branch}"
        (self.folder / f"{name}--{branch}").mkdir()
        return 200, {}

    def _preupload(self, body: bytes, name: str, revision: str) -> tuple[int, Any]:
        root, answers = self._place(name, revision), []
        for file in json.loads(body)["files"]:
            path, lfs = root / file["path"], self._is_lfs(file["path"])
            there = digest(path.read_bytes(), lfs) if path.is_file() else None
            answers.append({"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "oid": there,
                            "shouldIgnore": file["path"] in self.ignored})  # fmt: skip
        return 200, {"files": answers}

    def _batch(self, body: bytes, name: str) -> tuple[int, Any]:
        objects: list[dict[str, Any]] = []
        for wanted in json.loads(body)["objects"]:
            objects.append({"oid": wanted["oid"], "size": wanted["size"]})
            if self.forgetful or wanted["oid"] not in self.objects:
                objects[-1]["actions"] = {"upload": {"href": f"{self.url}/content/{wanted['oid']}"}}
        return 200, {"transfer": "basic", "objects": objects}

    def _take(self, handler: BaseHTTPRequestHandler, oid: str) -> None:
        """Receives the content of a file; all of it, or it is forgotten."""
        expected, content = int(handler.headers["Content-Length"]), b""
        while len(content) < expected:
            if oid == self.held and content and not self.goes_on.is_set():
                self.goes_on.wait()
                handler.close_connection = True  # whatever the system still has of a client that is gone
                return
            block = handler.rfile.read(min(_BLOCK, expected - len(content)))
            if not block:
                handler.close_connection = True
                return
            with self._lock:
                self.received[oid] += len(block)
            content += block
        if digest(content, True) == oid:
            self.objects[oid] = content
        self._send(handler, 200, b"", {})

    def _commit(self, body: bytes, name: str, revision: str) -> tuple[int, Any]:
        root = self._place(name, revision)
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "deletedFile":
                (root / value["path"]).unlink()
            elif entry["key"] in ("file", "lfsFile"):
                is_lfs = entry["key"] == "lfsFile"
                path = root / value["path"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.objects[value["oid"]] if is_lfs else base64.b64decode(value["content"]))
        commit = hashlib.sha1(body).hexdigest()  # noqa: S324 - Git's
        self.places[f"{name} {commit}"] = root.name
        return 200, {"commitOid": commit, "commitUrl": f"{self.url}/owner/{name}/commit/{commit}"}
