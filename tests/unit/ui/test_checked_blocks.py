"""What may be sent to a handler: every function of every page, every input, and files that nobody uploaded."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from gradio.components.api_component import Api
from gradio.state_holder import SessionState
from starlette.testclient import TestClient

from tests.made_runs import made_run
from trainers.run.web_host import TrustedHosts
from ui.checked_blocks import CheckedBlocks, is_plain_json, kind_of
from ui.context import ServerContext
from ui.gradio_start import MAX_FIELD
from ui.security import UPLOAD_PATH, Guard
from ui.server import asgi

JSON = {"Content-Type": "application/json"}
META = {"meta": {"_type": "gradio.FileData"}}


class App:
    """All pages behind their guards, called as a browser would call them.

    Args:
        folder: of runs and uploads.
    """

    def __init__(self, folder: Path):
        self.uploads = folder / "runs" / ".uploads"
        self.uploads.mkdir(parents=True)
        made_run(folder / "runs", "a-run", strategy="single", world=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GRADIO_TEMP_DIR", str(self.uploads))
            self.guard: Guard = asgi(
                ServerContext(folder / "runs", (folder,), self.uploads), TrustedHosts("testserver"), None
            )
        self.gradio = self.guard.app.app.app.routes[-1].app  # type: ignore[attr-defined]
        self.blocks: CheckedBlocks = self.gradio.get_blocks()
        self.client = TestClient(self.guard)  # type: ignore[arg-type]

    def call(self, fn: int, data: Any, path: str = "run/predict") -> Any:
        body = {"fn_index": fn, "data": data, "session_hash": "s"}
        return self.client.post(f"/gradio_api/{path}", content=json.dumps(body), headers=JSON)

    def files(self) -> set[Path]:
        return {path for path in self.uploads.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(folder / "runs" / ".uploads"))
        app = App(folder)
        with app.client:
            yield app


@pytest.fixture
def unchecked(app: App, monkeypatch: pytest.MonkeyPatch) -> App:
    """The same without its two guards, which is how Gradio comes."""
    monkeypatch.setattr(app.blocks, "has_launched", False)
    monkeypatch.setattr(CheckedBlocks, "validate_inputs", gr.Blocks.validate_inputs)
    return app


def proper(block: gr.blocks.Block) -> Any:
    """A value that the component sends."""
    values = {
        gr.Textbox: "",
        gr.Checkbox: False,
        gr.Number: 1,
        gr.CheckboxGroup: [],
        gr.UploadButton: None,
    }
    if type(block) in values:
        return values[type(block)]
    if isinstance(block, gr.Dropdown | gr.Radio):
        return [] if isinstance(block, gr.Dropdown) and block.multiselect else None
    schema = block.api_info()
    return {"string": "", "object": {}, "array": []}.get(schema.get("type"))


def nested(file: Any) -> list[Any]:
    """The ways in which a file may be sent in place of a value."""
    return [file, [file], [[file]], {"a": file}, [{"a": [file]}], {"value": file}, {"role": "user", "content": file}]


def test_every_input_of_every_function_refuses_files(app: App, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    paths = ["/etc/passwd", "/proc/self/environ", "/dev/zero", "http://127.0.0.1:1/x", __file__,
             str(tmp_path / "fifo"), str(app.uploads / "other.jsonl"), str(app.uploads / ".." / "x")]  # fmt: skip
    files = [{"path": path, **META} for path in paths]
    files += [{**files[0], "is_stream": True}, {**files[0], "url": paths[3]}]
    before, tried = app.files(), 0
    for block_fn in app.blocks.fns.values():
        values = [proper(block) for block in block_fn.inputs]
        if block_fn.fn is not None:
            app.blocks.validate_inputs(block_fn, values)  # what the page sends itself is let through
        for index, block in enumerate(block_fn.inputs):
            if not isinstance(block, Api):  # whose values are objects: this one names no file to Gradio
                with pytest.raises(gr.Error, match="refused"):
                    app.blocks.validate_inputs(
                        block_fn, [*values[:index], {"path": "/etc/passwd"}, *values[index + 1 :]]
                    )
            for value in (value for file in files for value in nested(file)):
                with pytest.raises(gr.Error, match="refused"):
                    app.blocks.validate_inputs(block_fn, [*values[:index], value, *values[index + 1 :]])
                tried += 1
    assert tried > 40_000
    assert app.files() == before


def test_no_file_comes_in_by_any_function_over_http(app: App, tmp_path: Path) -> None:
    """The same by way of the server, once for each input: nothing is read, copied, fetched or waited for."""
    os.mkfifo(tmp_path / "fifo")
    file = {"path": str(tmp_path / "fifo"), **META}
    before = app.files()
    for fn, block_fn in app.blocks.fns.items():
        values = [proper(block) for block in block_fn.inputs]
        for index in range(len(values)):
            answer = app.call(fn, [*values[:index], file, *values[index + 1 :]])
            assert answer.status_code == 500
            assert "refused" in answer.json()["error"]
    assert app.files() == before


def test_the_queue_refuses_them_too(app: App) -> None:
    file = {"path": "/etc/passwd", **META}
    before = app.files()
    bodies: dict[str, dict[str, Any]] = {
        "queue/join": {"fn_index": functions(app, gr.UploadButton)[0], "data": [file], "session_hash": "q"},
        "call/preview": {"data": [file]},
        "call/v2/preview": {"request": file},
    }
    for route, body in bodies.items():
        event = app.client.post(f"/gradio_api/{route}", json=body).json()["event_id"]
        asked = "queue/data?session_hash=q" if route == "queue/join" else f"call/preview/{event}"
        assert "refused" in app.client.get(f"/gradio_api/{asked}").text
    assert app.files() == before


def test_no_url_is_fetched(app: App) -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/x.jsonl"
        for fn in functions(app, gr.UploadButton):
            assert "refused" in app.call(fn, [{"path": url, "url": url, **META}]).json()["error"]
        assert asked == []
        server.shutdown()


def functions(app: App, kind: type) -> list[int]:
    """Functions whose first input is of a kind."""
    return [fn for fn, one in app.blocks.fns.items() if one.fn and one.inputs and isinstance(one.inputs[0], kind)]


@pytest.mark.parametrize("path", ["/proc/self/environ", "a file of the user"])
def test_without_the_guards_a_file_comes_out(unchecked: App, tmp_path: Path, path: str) -> None:
    """The attack that all this is about."""
    if path == "a file of the user":
        path = str(tmp_path / "own.txt")
        Path(path).write_text("nobody may read this")
    before = unchecked.files()
    unchecked.call(functions(unchecked, gr.Textbox)[0], [{"path": path, **META}] * 200)
    (copied,) = unchecked.files() - before
    assert copied.read_bytes() == Path(path).read_bytes() != b""
    assert TestClient(unchecked.gradio).get(f"/gradio_api/file={copied}").content == copied.read_bytes()


@pytest.mark.parametrize("guard", ["has_launched", "validate_inputs"])
def test_each_guard_alone_keeps_it_in(app: App, monkeypatch: pytest.MonkeyPatch, guard: str) -> None:
    if guard == "has_launched":
        monkeypatch.setattr(CheckedBlocks, "validate_inputs", gr.Blocks.validate_inputs)
    else:
        monkeypatch.setattr(app.blocks, "has_launched", False)
    before = app.files()
    assert app.call(functions(app, gr.Textbox)[0], [{"path": "/proc/self/environ", **META}] * 200).status_code == 500
    assert app.files() == before


# -- uploads ---------------------------------------------------------------------------------------------------------


def upload(app: App, name: str = "rows.jsonl", content: bytes = b"{}\n") -> str:
    return str(app.client.post("/gradio_api/upload", files={"files": (name, content)}).json()[0])


def test_an_uploaded_file_is_taken_and_what_lies_beside_it_is_not(app: App) -> None:
    taking = functions(app, gr.UploadButton)[0]
    path = upload(app)
    assert app.call(taking, [{"path": path, "orig_name": "rows.jsonl", "size": 3, **META}]).status_code == 200
    for other in (app.uploads / "rows.jsonl", app.uploads, Path(path).parent, Path(path).parent / "link.jsonl"):
        if other.name == "link.jsonl":
            other.parent.mkdir(exist_ok=True)
            other.symlink_to("/etc/passwd")
        assert "not a file that was uploaded here" in app.call(taking, [{"path": str(other), **META}]).json()["error"]


def test_what_the_server_stored_of_an_upload_is_not_kept_beside_its_copy(app: App) -> None:
    taking = functions(app, gr.UploadButton)
    before = set(app.uploads.rglob("*"))
    for fn in taking:
        (button,) = (block for block in app.blocks.fns[fn].inputs if isinstance(block, gr.UploadButton))
        name = "config.yaml" if ".yaml" in button.file_types else "rows.jsonl"
        app.call(fn, [{"path": upload(app, name), "orig_name": name, "size": 3, **META}])
    left = set(app.uploads.rglob("*")) - before
    assert len(taking) == 4
    kept = [path for path in left if path.suffix]  # the button itself makes an empty file without one
    assert [(path.parent, path.suffix) for path in kept] == [(app.uploads, ".jsonl")] * 3  # of three pages; no config
    assert not [path for path in left if path.is_dir()], left


def test_an_upload_that_became_a_link_is_refused(app: App) -> None:
    path = Path(upload(app, content=b"[]"))
    path.unlink()
    path.symlink_to("/etc/passwd")
    for fn in functions(app, gr.UploadButton):
        assert "not a file that was uploaded here" in app.call(fn, [{"path": str(path), **META}]).json()["error"]


def multipart(disposition: str, content: bytes, ends: bool = True) -> bytes:
    """A form of one part; without its end, if it is not to have one."""
    head = f"--b\r\nContent-Disposition: form-data; {disposition}\r\n\r\n"
    return head.encode() + content + (b"\r\n--b--\r\n" if ends else b"")


def test_a_field_that_is_no_file_is_short(app: App) -> None:
    """Gradio keeps it in memory, whatever its size."""
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    for size, status in ((MAX_FIELD, 200), (MAX_FIELD + 1, 400), (20 << 20, 400)):
        body = multipart('name="x"', bytes(size))
        assert app.client.post("/gradio_api/upload", content=body, headers=headers).status_code == status


def test_an_upload_that_breaks_off_leaves_nothing(app: App) -> None:
    before = app.files()
    body = multipart('name="files"; filename="a.jsonl"', b"x" * 100_000, ends=False)
    headers = [
        (b"host", b"testserver"),
        (b"content-length", b"999999"),
        (b"content-type", b"multipart/form-data; boundary=b"),
    ]
    scope = {"type": "http", "method": "POST", "path": UPLOAD_PATH, "headers": headers, "query_string": b"",
             "root_path": "", "scheme": "http", "server": ("testserver", 80), "http_version": "1.1"}  # fmt: skip
    messages = [{"type": "http.request", "body": body, "more_body": True}, {"type": "http.disconnect"}]
    seen: list[set[Path]] = []

    async def receive() -> dict[str, Any]:
        seen.append(app.files() - before)
        return messages.pop(0)

    async def send(message: Any) -> None:
        """Nobody listens."""

    asyncio.run(app.guard(scope, receive, send))
    assert len(seen[1]) == 1, "it is on the disk while it comes"
    assert app.files() == before


def test_nothing_of_the_uploads_folder_is_served(app: App) -> None:
    path = upload(app)
    for asked in (path, str(app.uploads), "/etc/passwd", f"{path}/../../../../../etc/passwd"):
        for route in ("file=", "file/", "proxy=http://"):
            assert app.client.get(f"/gradio_api/{route}{asked}").status_code == 404


@pytest.mark.parametrize("query", ["deep_link=x", "deep_link=../../x", "view=api", "view=/etc/passwd", "__theme=../x"])
def test_a_link_brings_no_file(app: App, query: str) -> None:
    before = app.files()
    for page in ("/", "/data", "/run", "/config"):
        assert "root:" not in app.client.get(f"{page}?{query}").text
    assert app.files() == before


# -- functions that scripts of the pages call --------------------------------------------------------------------------


def server_functions(app: App) -> list[tuple[int, str]]:
    """Each component with each of its server functions."""
    return [
        (number, name)
        for number, block in app.blocks.blocks.items()
        for name in dir(block)
        if getattr(getattr(block, name, None), "_is_server_fn", False)
    ]


WRONG = [
    None, 1, "x", [], [{"path": "/etc/passwd", **META}], {"path": "/etc/passwd", **META}, {"run": ["a-run"]},
    {"run": {"path": "/etc/passwd", **META}}, {"run": "a-run", "since": {"path": "x", **META}},
    {"run": "a-run", "since": [1], "after": [1], "find": {"a": 1}, "rank": [0]},
]  # fmt: skip


def test_every_server_function_takes_plain_values_alone(app: App) -> None:
    tried = server_functions(app)
    assert len(tried) >= 6
    before = app.files()
    for number, name in tried:
        for data in WRONG:
            body = {"data": data, "component_id": number, "session_hash": "s", "fn_name": name}
            answer = app.client.post("/gradio_api/component_server", json=body)
            assert answer.status_code == 200
            assert list(answer.json()) == ["error"], (name, data)
    assert app.files() == before


# -- kinds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("component", "right", "wrong"),
    [
        (gr.Textbox, ["", "x", None], [1, True, [], {}, "\ud800", ["x"]]),
        (gr.Checkbox, [True, False, None], [1, 0, "true", [], {}]),
        (gr.Number, [1, 0.5, None], ["1", True, float("nan"), float("inf"), []]),
        (gr.Radio, ["x", 1, None], [True, ["x"], {}]),
        (gr.Dropdown, ["x", 1, None], [True, ["x"], {}]),
        (lambda: gr.Dropdown(multiselect=True), [["x", 1], [], None], ["x", [["x"]], [None], {}]),
        (gr.CheckboxGroup, [["x"], [], None], ["x", [True], [{}]]),
    ],
)  # fmt: skip
def test_kinds(component: Callable[[], gr.blocks.Block], right: list[Any], wrong: list[Any]) -> None:
    block = component()
    check, _ = kind_of(block)
    assert [value for value in right if not check(block, value, set())] == []
    assert [value for value in wrong if check(block, value, set())] == []


def test_a_component_of_which_nothing_is_known_is_no_input() -> None:
    with CheckedBlocks() as blocks:
        gr.Button().click(lambda value: value, gr.Image(), None)
    with pytest.raises(TypeError, match="Image is not a supported input"):
        blocks.check_kinds()


def test_deep_json_is_refused_and_not_followed() -> None:
    value: Any = "x"
    for _ in range(900):
        value = [value]
    assert not is_plain_json(value)
    assert is_plain_json({"options": {"lora_targets": ["a", "b"]}})


def postprocessed(values: Any, outputs: int = 3) -> tuple[list[Any], list[int]]:
    """What a handler's values become, and which outputs were built anew for them."""
    with CheckedBlocks() as blocks:
        boxes = [gr.Textbox(str(number)) for number in range(outputs)]
        button = gr.Button()
        button.click(lambda: None, None, boxes)
    state = SessionState(blocks)
    before = {box._id: state[box._id] for box in boxes}
    answer = asyncio.run(blocks.postprocess_data(blocks.fns[0], values, state))
    return answer, [index for index, box in enumerate(boxes) if state[box._id] is not before[box._id]]


SKIP = gr.skip()


@pytest.mark.parametrize(
    ("values", "answer", "built"),
    [
        ([SKIP, SKIP, SKIP], [SKIP, SKIP, SKIP], []),
        (["a", SKIP, "c"], ["a", SKIP, "c"], []),
        ([SKIP, gr.update(value="b", visible=False), "c"], [SKIP, "b", "c"], [1]),
        ([SKIP, SKIP, gr.update(value="c")], [SKIP, SKIP, "c"], [0, 2]),
        ([gr.update(value="a"), SKIP, SKIP], ["a", SKIP, SKIP], [0, 1]),
    ],
)
def test_a_skipped_output_is_not_built_anew(values: list[Any], answer: list[Any], built: list[int]) -> None:
    given, rebuilt = postprocessed(values)
    assert [value.get("value", SKIP) if isinstance(value, dict) else value for value in given] == answer
    assert rebuilt == built


def test_one_output_takes_a_value_and_too_few_values_are_refused() -> None:
    assert postprocessed("a", outputs=1)[0] == ["a"]
    with pytest.raises(ValueError, match="output"):
        postprocessed(["a"])
