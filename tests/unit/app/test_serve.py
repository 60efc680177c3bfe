"""The verb `serve` before there is a server: what it refuses, and the command that it makes for vLLM."""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from app.cli import run_verb
from app.commands import serve
from app.services.model_names import NamedModel, named_model
from app.services.vllm_server import HOST_GUARD, vllm_argv, vllm_environment
from tests.made_runs import add_checkpoint, made_run
from trainers.checkpoint.export_check import BASE
from trainers.config.mistakes import ConfigError
from trainers.embedded import BASE_DIR
from trainers.run.folder import write_json

TOKEN = "0123456789abcdef"  # noqa: S105
ADAPTER: dict[str, Any] = {
    "peft_type": "LORA", "base_model_name_or_path": str(BASE_DIR), "r": 20, "bias": "none", "revision": None,
}  # fmt: skip


@pytest.fixture
def runs(elsewhere: None, tmp_path: Path) -> Path:
    """Runs with an adapter and a checkpoint, with full weights, and with a checkpoint alone."""
    first = made_run(tmp_path / "runs", "first", config={"method": "lora"})
    add_checkpoint(first, 20)
    first.model.mkdir()
    write_json(first.model / "adapter_config.json", ADAPTER)
    shutil.copytree(BASE_DIR, made_run(tmp_path / "runs", "second", config={"method": "full"}).model)
    add_checkpoint(made_run(tmp_path / "runs", "third"), 5)
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--engine", "tgi"], "engine='tgi' is unknown; use transformers or vllm"),
        (["--engine", "vllm"], "engine=vllm is not installed; run: pip install vllm"),
        (["--port", "65536"], "port='65536' is not a port; use 0 to 65535"),
        (["--port", "x"], "port='x' is not a port"),
        (["--host", "0.0.0.0"], "host=0.0.0.0 is reachable from other machines, but no token is set"),  # noqa: S104
        (["--host", "a b"], "host='a b' is not a host"),
        (["--max_concurrent", "0"], "max_concurrent='0' is not a whole"),
        (["--max_waiting", "-1"], "max_waiting='-1' is not a whole number"),
        (["--max_new_tokens", "1e9"], "max_new_tokens='1e9' is not a whole number; write 1 to 1,000,000"),
        (["--device", "gpu"], "device='gpu' is unknown"), (["--revision", "a b"], "revision='a b' is not a branch"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused(runs: Path, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["serve", "first", *flags]) == 2
    assert says in capsys.readouterr().err


def test_all_mistakes_are_reported_at_once(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["serve", "first", "--port", "-5", "--device", "x", "--max_concurrent", "many"]) == 2
    assert capsys.readouterr().err.count("error: ") == 3


@pytest.mark.parametrize("token", ["short", "with spaces in its middle", "é" * 20, "x" * 201])
def test_a_token_that_no_header_can_carry_is_refused(
    runs: Path, token: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TUNESMITH_SERVE_TOKEN", token)
    assert run_verb(["serve", "first"]) == 2
    errors = capsys.readouterr().err
    assert "TUNESMITH_SERVE_TOKEN is not 16 to 200 printable ASCII characters" in errors
    assert token not in errors


@pytest.mark.parametrize(
    ("name", "label", "request_of"),
    [
        ("first", "first", {"run_dir": "first", "weights": "model"}),
        ("first@step-00000020", "first@step-00000020", {"run_dir": "first", "weights": "step-00000020"}),
        ("third", "third@step-00000005", {"run_dir": "third", "weights": "step-00000005"}),
        ("runs/first/model", "first/model", {"adapter": "first/model"}),
        ("runs/second/model", "second/model", {"model": "second/model"}),
        ("embedded", "embedded", {"model": None}), ("org/model", "org/model", {"model": None}),
    ],
)  # fmt: skip
def test_each_name_is_loaded_as_the_chat_loads_it(
    runs: Path, name: str, label: str, request_of: dict[str, str | None]
) -> None:
    model = named_model(name, runs)
    assert model.label == label
    request = serve._load_request(model, None)
    for key, value in request_of.items():
        assert request[key] == (str(runs / value) if value and key != "weights" else value or label)


@pytest.mark.parametrize("name", ["nothing", "first@step-00000099", "first@../second", "runs/first/checkpoints"])
def test_an_unknown_model_is_refused(runs: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["serve", name]) == 2
    assert "error: " in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve.listen("127.0.0.1", 0, 0) as taken:
        assert run_verb(["serve", "first", "--port", str(taken.getsockname()[1])]) == 2
    assert "is in use; choose another" in capsys.readouterr().err


# -- vLLM ------------------------------------------------------------------------------------------------------------


def options_of(argv: list[str]) -> dict[str, str]:
    flags = argv[argv.index("serve") + 2 :]
    pairs = {word: following for word, following in zip(flags, [*flags[1:], ""], strict=True) if word.startswith("--")}
    return {name: "" if value.startswith("--") else value for name, value in pairs.items()}


def test_vllm_serves_full_weights_under_the_name_of_the_run(runs: Path) -> None:
    argv = vllm_argv(named_model("second", runs), "127.0.0.1", 8001, 512, 3)
    assert argv[argv.index("serve") + 1] == str(runs / "second/model")
    options = options_of(argv)
    assert (options["--served-model-name"], options["--host"], options["--port"]) == ("second", "127.0.0.1", "8001")
    assert (options["--allowed-origins"], options["--max-num-seqs"]) == ("[]", "3")
    assert json.loads(options["--override-generation-config"]) == {"max_new_tokens": 512}
    assert not {"--trust-remote-code", "--api-key", "--enable-lora", "--revision"} & options.keys()
    hub = options_of(vllm_argv(NamedModel("org/m"), "::1", 1, 5, None, "v1", remote_code=True))
    assert (hub["--revision"], hub["--trust-remote-code"], "--max-num-seqs" in hub) == ("v1", "", False)
    embedded = vllm_argv(NamedModel("embedded"), "127.0.0.1", 1, 5)
    assert embedded[embedded.index("serve") + 1] == str(BASE_DIR)


def test_vllm_serves_an_adapter_beside_its_base(runs: Path) -> None:
    argv = vllm_argv(named_model("first", runs), "127.0.0.1", 8001, 512)
    assert argv[argv.index("serve") + 1] == str(BASE_DIR)
    options = options_of(argv)
    lora = json.loads(options["--lora-modules"])
    assert lora == {"name": "first", "path": str(runs / "first/model"), "base_model_name": "first-base"}
    assert (options["--served-model-name"], options["--max-lora-rank"]) == ("first-base", "32"), "20 is not offered"


def test_vllm_reads_the_chat_template_of_an_adapter(runs: Path) -> None:
    folder = runs / "first/model"
    assert "--tokenizer" not in options_of(vllm_argv(named_model("first", runs), "127.0.0.1", 1, 5)), "it has none"
    shutil.copy(BASE_DIR / "tokenizer_config.json", folder)
    options = options_of(vllm_argv(named_model("first", runs), "127.0.0.1", 1, 5))
    assert options["--tokenizer"] == str(folder.absolute())


def test_an_adapter_on_scaled_rope_is_not_for_vllm(runs: Path) -> None:
    """Its folder has the config of its base, as `trainers.checkpoint.export_check.BASE` says."""
    (runs / "first/model" / BASE).mkdir()
    with pytest.raises(ConfigError, match=r"without the scaled RoPE .* --merged"):
        vllm_argv(named_model("first", runs), "127.0.0.1", 8001, 512)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_dora": True}, "as it is .use_dora."), ({"peft_type": "VERA"}, "peft_type=VERA"),
        ({"r": 513}, "rank 512"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"), ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"base_model_name_or_path": None}, "names no base model"), ({"r": None}, "rank 512"),
    ],
)  # fmt: skip
def test_an_adapter_that_vllm_would_change_is_refused(runs: Path, changes: dict[str, Any], says: str) -> None:
    write_json(runs / "first/model/adapter_config.json", ADAPTER | changes)
    with pytest.raises(ConfigError, match=says):
        vllm_argv(named_model("first", runs), "127.0.0.1", 8001, 512)


def test_a_checkpoint_is_exported_first(runs: Path) -> None:
    with pytest.raises(ConfigError, match="tunesmith export third --checkpoint step-00000005"):
        vllm_argv(named_model("third", runs), "127.0.0.1", 8001, 512)


def test_the_token_goes_to_vllm_in_its_variable_alone() -> None:
    outer = {"TUNESMITH_SERVE_TOKEN": TOKEN, "VLLM_API_KEY": "old", "PATH": "/bin"}
    env = vllm_environment(outer, TOKEN, "box", {"CUDA_VISIBLE_DEVICES": "GPU-1"})
    assert {name for name, value in env.items() if TOKEN in value} == {"VLLM_API_KEY"}
    assert (env["TUNESMITH_SERVE_HOST"], env["CUDA_VISIBLE_DEVICES"], env["PATH"]) == ("box", "GPU-1", "/bin")
    assert "VLLM_API_KEY" not in vllm_environment(outer, None, "box", {})
    assert TOKEN not in " ".join(vllm_argv(NamedModel("org/m"), "box", 1, 5))


def test_the_verb_becomes_vllm(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package and a program of that name; what `exec` gets is all that can be seen without vLLM."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TUNESMITH_SERVE_TOKEN", TOKEN)
    became: list[Any] = []

    def execve(path: str, argv: list[str], env: dict[str, str]) -> None:
        became.extend([path, argv, env])
        raise SystemExit(0)

    monkeypatch.setattr(serve.os, "execve", execve)
    with pytest.raises(SystemExit):
        run_verb(["serve", "second", "--engine", "vllm", "--port", "0"])
    path, argv, env = became
    assert path == argv[0]
    assert int(options_of(argv)["--port"]) > 0
    assert (env["VLLM_API_KEY"], env["TUNESMITH_SERVE_HOST"]) == (TOKEN, "127.0.0.1")
    printed = capsys.readouterr()
    assert printed.out == "", "nothing listens yet"
    port = options_of(argv)["--port"]
    assert f"once vLLM has loaded the model, it listens at http://127.0.0.1:{port}/v1" in printed.err
    assert run_verb(["serve", "second", "--engine", "vllm", "--max_waiting", "3"]) == 2


def test_vllm_can_take_the_check_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM does: imports a class by its path, and calls it with the app alone."""
    monkeypatch.setenv("TUNESMITH_SERVE_HOST", "box.lan")
    module, _, name = HOST_GUARD.rpartition(".")
    passed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["type"])

    guard = getattr(importlib.import_module(module), name)(app)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    def ask(host: str, kind: str = "http", path: str = "/v1/models") -> None:
        scope = {"type": kind, "path": path, "headers": [(b"host", host.encode())]}
        asyncio.run(guard(scope, receive, send))

    for host in ("box.lan:8000", "127.0.0.1", "localhost:1"):
        ask(host)
    ask("evil.example")
    ask("box.lan", "websocket")
    assert (passed, sent[0]["status"], sent[-1]["type"]) == (["http"] * 3, 400, "websocket.close")
    sent.clear()
    # vLLM asks nobody for its key on these paths.
    for path in ("/invocations", "/pause", "/tokenize", "/update_weights", "//v1/models", "/metrics"):
        ask("box.lan", path=path)
    assert len(passed) == 3
    assert {message["status"] for message in sent if "status" in message} == {404}
    for path in ("/v1/chat/completions", "/health"):
        ask("box.lan", path=path)
    ask(socket.gethostname())
    assert len(passed) == 6
