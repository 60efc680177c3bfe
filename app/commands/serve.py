"""The verb `serve`: checks its arguments, takes port and GPU, and replaces itself with the server of the model."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.accelerate_launch import module_argv, module_environment
from app.console import say, shortened
from app.services.chat import check_device, take_gpu
from app.services.listening import HOST, listen, port_number
from app.services.model_names import NamedModel, named_model
from app.services.vllm_server import vllm_argv, vllm_environment
from trainers.config.mistakes import ConfigError, Mistake, Mistakes
from trainers.config.parse import whole_number
from trainers.run.web_host import LOOPBACK, SERVE_TOKEN, bracketed

DEFAULT_PORT = 8000
DEFAULT_WAITING = 16
MIN_TOKEN_LENGTH = 16
_ENGINES = ("transformers", "vllm")
_MOST_TOKENS = 1_000_000
_TOKEN = re.compile(rf"[\x21-\x7e]{{{MIN_TOKEN_LENGTH},200}}")


@dataclass(frozen=True)
class Options:
    """The options of a command line, as texts.

    Args:
        port: port to listen on; None for 8000 or the next free one.
        host: address or name to listen on.
        engine: `transformers` or `vllm`.
        max_concurrent: answers at a time; None for the engine's default.
        max_waiting: requests that may wait; None for the default.
        max_new_tokens: most tokens of an answer.
        device: `auto`, `cpu` or a GPU's index.
        revision: of a model on the Hub.
    """

    port: str | None = None
    host: str = "127.0.0.1"
    engine: str = "transformers"
    max_concurrent: str | None = None
    max_waiting: str | None = None
    max_new_tokens: str = "2048"
    device: str = "auto"
    revision: str | None = None


@dataclass(frozen=True)
class _Limits:
    """The checked numbers of the options."""

    port: int | None
    concurrent: int | None
    waiting: int
    tokens: int


def serve_verb(name: str, runs_dir: Path, options: Options, remote_code: bool = False) -> int:
    """`tunesmith serve`: on success this process becomes the server and does not return.

    Args:
        name: the model, as `app.services.model_names.named_model` takes it.
        runs_dir: folder of run folders.
        options: the options.
        remote_code: run model code that comes with the weights.

    Raises:
        ConfigError: with one line per mistake.
    """
    token = os.environ.get(SERVE_TOKEN)
    limits = _check(options, token)
    model = named_model(name, runs_dir)
    if options.revision and (model.run is not None or model.folder is not None):
        raise ConfigError.about(
            "revision", options.revision, f"is of the Hub, and {model.label} is not", "leave it out"
        )
    listening = listen(options.host, limits.port, DEFAULT_PORT)
    if options.host not in LOOPBACK:
        say("warning: traffic to this server is not encrypted; use an SSH tunnel or a TLS proxy")
    gpu, lock = take_gpu(options.device, f"serve {model.label}")
    visible = {"CUDA_VISIBLE_DEVICES": gpu.uuid if gpu else ""}
    for descriptor in lock.descriptors if lock else ():  # held as long as the server lives
        os.set_inheritable(descriptor, True)
    if options.engine == "vllm":
        port = listening.getsockname()[1]
        listening.close()
        argv = vllm_argv(
            model, options.host, port, limits.tokens, limits.concurrent, options.revision, remote_code
        )  # fmt: skip
        say(f"once vLLM has loaded the model, it listens at http://{bracketed(options.host)}:{port}/v1")
        os.execve(argv[0], argv, vllm_environment(os.environ, token, options.host, visible))  # noqa: S606
    settings = {
        "name": model.label,
        "request": {**_load_request(model, options.revision), "remote_code": remote_code},
        "host": options.host,
        "socket": listening.fileno(),
        "max_concurrent": limits.concurrent,
        "max_waiting": limits.waiting,
        "max_new_tokens": limits.tokens,
    }
    os.set_inheritable(listening.fileno(), True)
    argv = module_argv("trainers.tools.serve", [json.dumps(settings)])
    os.execve(sys.executable, argv, {**module_environment(), **visible})  # noqa: S606


def _load_request(model: NamedModel, revision: str | None) -> dict[str, Any]:
    """What to load, as `trainers.tools.chat` takes it."""
    if model.run is not None:
        return {"run_dir": str(model.run.path.absolute()), "weights": model.weights}
    if model.is_adapter:
        return {"adapter": str(model.folder)}
    return {"model": str(model.folder or model.label), "revision": revision}


def _check(options: Options, token: str | None) -> _Limits:
    """The numbers of the options.

    Raises:
        ConfigError: with one line per mistake.
    """
    mistakes, port = Mistakes(), None
    if options.engine not in _ENGINES:
        mistakes.append(Mistake("engine", repr(shortened(options.engine)), "is unknown", "use transformers or vllm"))
    elif importlib.util.find_spec({"vllm": "vllm", "transformers": "uvicorn"}[options.engine]) is None:
        package = {"vllm": "vllm", "transformers": '"tunesmith[serve]"'}[options.engine]
        mistakes.append(Mistake("engine", options.engine, "is not installed", f"run: pip install {package}"))
    try:
        port = port_number(options.port, lowest=0)
    except ValueError:
        mistakes.append(Mistake("port", repr(shortened(str(options.port))), "is not a port", "use 0 to 65535"))
    if not HOST.fullmatch(options.host):
        remedy = "write an address such as 127.0.0.1, or a name"
        mistakes.append(Mistake("host", repr(shortened(options.host)), "is not a host", remedy))
    elif options.host not in LOOPBACK and not token:
        problem = "is reachable from other machines, but no token is set"
        mistakes.append(Mistake("host", options.host, problem, f"set {SERVE_TOKEN}, or leave out --host"))
    if token is not None and not _TOKEN.fullmatch(token):
        problem = f"{SERVE_TOKEN} is not {MIN_TOKEN_LENGTH} to 200 printable ASCII characters without spaces"
        mistakes.append(Mistake("", None, problem, "such as `openssl rand -hex 16` prints"))
    if options.engine == "vllm" and options.max_waiting is not None:
        problem = "is not an option of vLLM, which lets all requests wait"
        mistakes.append(Mistake("max_waiting", options.max_waiting, problem, "leave it out"))
    concurrent = _number(mistakes, "max_concurrent", options.max_concurrent, 1, 1024)
    waiting = _number(mistakes, "max_waiting", options.max_waiting, 0, 10_000)
    tokens = _number(mistakes, "max_new_tokens", options.max_new_tokens, 1, _MOST_TOKENS)
    with mistakes:
        check_device(options.device, options.revision)
    mistakes.refuse()
    return _Limits(port, concurrent, DEFAULT_WAITING if waiting is None else waiting, tokens or _MOST_TOKENS)


def _number(mistakes: Mistakes, name: str, text: str | None, lowest: int, most: int) -> int | None:
    """The number of an option; None if it is not set, or a mistake."""
    if text is None or (number := whole_number(text, lowest, most)) is None:
        if text is not None:
            quoted = repr(shortened(text))
            mistakes.append(Mistake(name, quoted, "is not a whole number", f"write {lowest} to {most:,}"))
        return None
    return number
