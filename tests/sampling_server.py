"""A stand-in for `vllm serve`: the same HTTP interface, answers by transformers and peft, in a process of its own.

It shares no code with the client. Messages and defaults are those of vLLM as far as the client reads them.
`python -m tests.sampling_server MODEL ...` prints its port once it serves. `--fault` lets it do something wrong. GET
/control tells what was asked of it, POST changes its settings.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

FAULTS = ("none", "stale", "other-name", "die", "hang", "flaky")
"""What it does from the request `--after` on: answers with the first adapter of all, answers in the name of another
model, ends, never answers, or refuses every other request with status 503."""
PLAIN: dict[str, Any] = {"trust_env": False, "verify": False, "timeout": 60}
ROOT = Path(__file__).resolve().parent.parent


class Served:
    """The model, its adapters, and what was asked of it."""

    def __init__(self, arguments: argparse.Namespace):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.arguments, self.lock, self.requests = arguments, threading.Lock(), 0
        self.base = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
        self.model: Any = self.base
        self.adapters: dict[str, tuple[str, str]] = {}
        """Name in peft and path, by name."""
        self.first: tuple[str, str] | None = None
        self.answered = 0
        self.received: list[tuple[str, str]] = []
        """Path and name of the model or adapter of each POST."""

    def load(self, name: str, path: str) -> tuple[int, Any]:
        from peft import PeftModel

        if name in self.adapters:
            return error(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
        try:
            rank = json.loads((Path(path) / "adapter_config.json").read_text())["r"]
        except OSError:
            return error(404, f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError")
        if not self.arguments.enable_lora:
            return error(500, "LoRA is not enabled.", "InternalServerError")
        if rank > self.arguments.max_lora_rank:
            text = f"LoRA rank {rank} is greater than max_lora_rank {self.arguments.max_lora_rank}."
            return error(500, text, "InternalServerError")
        self.answered += 1
        inner = f"a{self.answered}"
        if isinstance(self.model, PeftModel):
            self.model.load_adapter(path, adapter_name=inner)
        else:
            self.model = PeftModel.from_pretrained(self.base, path, adapter_name=inner)
        self.model.eval()
        self.adapters[name] = (inner, path)
        self.first = self.first or self.adapters[name]
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, name: str) -> tuple[int, Any]:
        if name not in self.adapters:
            return error(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        entry = self.adapters.pop(name)
        if entry != self.first:
            self.model.delete_adapter(entry[0])
        return 200, f"Success: LoRA adapter '{name}' removed successfully."

    def models(self) -> tuple[int, Any]:
        base = self.arguments.served_model_name or self.arguments.model
        cards = [{"id": base, "root": self.arguments.model, "parent": None,
                  "max_model_len": self.arguments.max_model_len}]  # fmt: skip
        cards += [
            {"id": name, "root": path, "parent": base, "max_model_len": None}
            for name, (_, path) in self.adapters.items()
        ]
        return 200, {"object": "list", "data": cards}

    def complete(self, body: dict[str, Any], faulty: bool) -> tuple[int, Any]:
        import torch

        name = body["model"]
        if name not in self.adapters:
            return error(404, f"The model `{name}` does not exist.", "NotFoundError")
        entry = self.first if faulty and self.arguments.fault == "stale" else self.adapters[name]
        assert entry is not None
        self.model.set_adapter(entry[0])
        generator, temperature = torch.Generator().manual_seed(body["seed"]), body["temperature"]
        tokens, log_probs, tops = list[int](), list[float](), list[dict[str, float]]()
        ids, cache = torch.tensor([body["prompt"]]), None
        with torch.no_grad():
            while len(tokens) < body["max_tokens"]:
                output = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
                logits, cache = output.logits[0, -1].float(), output.past_key_values
                scaled = (logits / (temperature or 1.0)).log_softmax(-1)
                token = int(torch.multinomial(scaled.exp(), 1, generator=generator) if temperature else logits.argmax())
                reported = scaled if self.arguments.logprobs_mode == "processed_logprobs" else logits.log_softmax(-1)
                tokens.append(token)
                log_probs.append(float(reported[token]))
                tops.append({f"token_id:{int(reported.argmax())}": float(reported.max())} if body["logprobs"] else {})
                ids = torch.tensor([[token]])
                if token in body["stop_token_ids"]:
                    break
        ended = tokens[-1] in body["stop_token_ids"]
        choice = {
            "index": 0, "text": "...", "finish_reason": "stop" if ended else "length", "token_ids": tokens,
            "logprobs": {"token_logprobs": log_probs, "top_logprobs": tops}, "prompt_token_ids": body["prompt"],
        }  # fmt: skip
        choice |= self.arguments.choice
        own = "another" if faulty and self.arguments.fault == "other-name" else name
        return 200, {"object": "text_completion", "model": own, "choices": [choice], **self.arguments.answer}


def error(status: int, text: str, kind: str) -> tuple[int, Any]:
    """As vLLM words an error."""
    return status, {"error": {"message": text, "type": kind, "param": None, "code": status}}


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    served: Served

    def log_message(self, *details: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, None)
        elif self.path == "/control":
            self._send(200, self.served.received)
        elif self.path == "/v1/models":
            self._answer(self.served.models)
        else:
            self._send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        served, settings = self.served, self.served.arguments
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/control":
            vars(settings).update(body)
            return self._send(200, None)
        served.received.append((self.path, body.get("lora_name", body.get("model"))))
        if settings.raw and self.path == "/v1/completions":
            return self._send(settings.raw["status"], settings.raw["content"], settings.raw.get("headers"))
        if self.path == "/v1/completions":
            with served.lock:
                served.requests += 1
                faulty = settings.fault != "none" and served.requests > settings.after
            if faulty and settings.fault == "die":
                os._exit(1)
            if faulty and settings.fault == "hang":
                threading.Event().wait()
            if faulty and settings.fault == "flaky" and served.requests % 2:
                return self._send(503, None)
            self._answer(lambda: served.complete(body, faulty))
        elif self.path == "/v1/load_lora_adapter" and settings.runtime:
            self._answer(lambda: served.load(body["lora_name"], body["lora_path"]))
        elif self.path == "/v1/unload_lora_adapter" and settings.runtime:
            self._answer(lambda: served.unload(body["lora_name"]))
        else:
            self._send(404, {"detail": "Not Found"})
        return None

    def _answer(self, work: Any) -> None:
        key = self.served.arguments.api_key
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            return self._send(401, {"error": "Unauthorized"})
        with self.served.lock:
            status, value = work()
        return self._send(status, value)

    def _send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        content = b"" if value is None else text.encode()
        self.send_response(status)
        for name, held in (headers or {}).items():
            self.send_header(name, held)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class Server(ThreadingHTTPServer):
    """Takes as many connections at a time as the client opens."""

    request_queue_size = 256
    daemon_threads = True
    allow_reuse_address = True


def main(argv: list[str]) -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--served-model-name")
    parser.add_argument("--api-key")
    parser.add_argument("--logprobs-mode", default="raw_logprobs")
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--after", type=int, default=0)
    runtime = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "True"
    parser.set_defaults(runtime=runtime, raw=None, choice={}, answer={})
    settings = parser.parse_args(argv)
    Handler.served = Served(settings)
    server = Server(("127.0.0.1", settings.port), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


# -- for tests ---------------------------------------------------------------------------------------------------------


@dataclass
class Running:
    """A server in a process of its own.

    Attributes:
        url: its address.
        process: the process.
    """

    url: str
    process: subprocess.Popen[str]

    def set(self, **settings: Any) -> None:
        """Changes settings, which are named as in `main`; `raw` is the whole answer to a request for a completion,
        `choice` and `answer` are changes in it."""
        content = json.dumps(settings)  # with NaN, unlike httpx
        httpx.post(f"{self.url}/control", content=content, **PLAIN).raise_for_status()

    def names(self, end: str) -> list[str]:
        """Names of models or adapters in the requests to a path so far, in order."""
        requests = httpx.get(f"{self.url}/control", **PLAIN).json()
        return [name for path, name in requests if path.endswith(end)]


@contextlib.contextmanager
def serving(model: Path | str, *arguments: str, runtime: bool = True, port: int = 0) -> Iterator[Running]:
    """A server that runs meanwhile.

    Args:
        model: folder of the base model.
        arguments: command-line arguments.
        runtime: whether adapters can be loaded while it runs.
        port: the port; 0 for a free one.
    """
    command = [sys.executable, "-m", "tests.sampling_server", str(model), "--port", str(port), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": str(runtime)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        yield Running(f"http://127.0.0.1:{int(process.stdout.readline())}", process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
