"""A client of a vLLM server (0.10.2 or later) that samples answers from a LoRA adapter, by its documented interface.

- https://docs.vllm.ai/en/latest/features/lora/: `/v1/load_lora_adapter` and `/v1/unload_lora_adapter` exist with
  `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True` and `--enable-lora`; `/v1/models` lists what is loaded.
- https://docs.vllm.ai/en/latest/serving/openai_compatible_server/: `/v1/completions` takes token ids as `prompt`, a
  `seed`, `stop_token_ids` and `ignore_eos`; `return_token_ids` adds `token_ids` to each answer. All sampling parameters
  are sent, because the defaults of a server come from the model's `generation_config.json`.
- `--logprobs-mode`: by default log-probabilities are those before the temperature (`raw_logprobs`).

The server is other software, maybe under attack: an answer that is not what was asked is refused, not repaired.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from trainers.config.sampler import API_KEY
from trainers.objectives.sampling import Sampled
from trainers.run.errors import Interrupted, TrainingError
from trainers.run.log import without_secrets

CONCURRENT = 128
"""Requests at a time; the server batches them."""
_LEAST = -1e30
"""Below it, a log-probability would not be finite in fp32."""
ATTEMPTS = 4
"""Tries of a request that no answer came to, or one with status 5xx."""
PAUSE = 1.0
"""Seconds before the second try; twice as many before each further one."""
CONNECT = 10.0
"""Seconds that a connection may take."""
SHORT_LIMIT = 60.0
"""Seconds that any other request may take, all tries together, such as the one that loads an adapter."""
PLAIN_BYTES = 2**20
"""Most bytes of an answer without tokens."""
TOKEN_BYTES = 1024
"""Most bytes of an answer for each token of it and of its prompt."""
_LAZY = "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"


@dataclass(frozen=True)
class ServerRequest:
    """What is asked of the server for a step.

    Args:
        model: name of the adapter.
        prompts: token ids of each prompt.
        seeds: of each answer.
        temperature: divides the logits; 0 for the most likely tokens.
        most_tokens: tokens of an answer, at most.
        stops: token ids that end an answer.
        vocabulary: number of token ids.
    """

    model: str
    prompts: Sequence[np.ndarray]
    seeds: Sequence[int]
    temperature: float
    most_tokens: int
    stops: Sequence[int]
    vocabulary: int

    def body(self, number: int) -> dict[str, Any]:
        """The request for an answer."""
        return {
            "model": self.model, "prompt": self.prompts[number].tolist(), "n": 1, "max_tokens": self.most_tokens,
            "temperature": self.temperature, "seed": self.seeds[number], "logprobs": 0, "return_token_ids": True,
            "stop_token_ids": list(self.stops), "ignore_eos": True, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        }  # fmt: skip


class SamplingServer:
    """The server at an address.

    Args:
        url: `http(s)://host:port`, perhaps with a path; a `/v1` at its end is left out.
        limit: seconds that the answers of a step may take, all tries together.
    """

    def __init__(self, url: str, limit: float):
        self.url, self.limit = url.rstrip("/").removesuffix("/v1"), limit
        # Made once, as it takes long; without TLS there is nothing to verify.
        self._verify = httpx.create_ssl_context() if self.url.startswith("https:") else False
        key = os.environ.get(API_KEY, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise TrainingError(f"{API_KEY} holds a character that no HTTP header can have; set it again")
        self._headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})}

    def check(self, models: Sequence[str], tokens: int) -> list[str]:
        """Refuses a server that does not serve the base model, or too short a context.

        Args:
            models: names and paths of the base model.
            tokens: of the longest prompt with its answer.

        Returns:
            Names of the adapters that it has loaded.

        Raises:
            TrainingError: saying what is wrong, and what to do.
        """
        self._call("GET", "/health", None)
        cards = self._models()
        bases = [card for card in cards if card.get("parent") is None]
        of_run = [card for card in bases if {str(card.get("id")), str(card.get("root"))} & {*models}]
        if not of_run:
            serves = ", ".join(sorted({str(card.get("id"))[:200] for card in bases})) or "nothing"
            raise TrainingError(
                f"sampler_url={self.url} serves {serves!r}, and this run trains {models[0]}; start it with that model, "
                f"or with --served-model-name {models[0]} if it is a copy of it"
            )
        context = of_run[0].get("max_model_len")
        if not isinstance(context, int) or context < tokens:
            raise TrainingError(
                f"sampler_url={self.url} has a context of {context} tokens, and max_length is {tokens}; start it with "
                f"--max-model-len {tokens}, or make max_length smaller"
            )
        return [str(card.get("id")) for card in cards if card.get("parent") is not None]

    def load(self, name: str, folder: Path) -> None:
        """Loads an adapter.

        Args:
            name: the name to ask for it by.
            folder: the adapter as peft saves it, at the same path on the server's machine.

        Raises:
            TrainingError: if the server refuses it.
        """
        body = {"lora_name": name, "lora_path": str(folder)}
        status, answer = asyncio.run(self._single("POST", "/v1/load_lora_adapter", body))
        if status == 400 and any(card.get("id") == name for card in self._models()):
            return  # an earlier try was done, though its answer was lost
        if status == 404 and '"error"' not in answer:  # there is no such path; a missing adapter is an error of vLLM
            raise TrainingError(f"sampler_url={self.url} cannot load adapters at runtime; {_LAZY}")
        if status != 200:
            raise TrainingError(
                f"sampler_url={self.url} does not load the adapter {folder} (status {status}: {_quoted(answer)}); "
                f"{_LAZY} and --max-lora-rank, on a machine that sees this folder"
            )

    def unload(self, name: str) -> None:
        """Unloads an adapter, if it is loaded."""
        status, answer = asyncio.run(self._single("POST", "/v1/unload_lora_adapter", {"lora_name": name}))
        if status not in (200, 404):
            raise self._refused("/v1/unload_lora_adapter", status, answer)

    def refuse_raw(self, request: ServerRequest) -> None:
        """Refuses a server whose log-probabilities are those before the temperature.

        The most likely first token then has the same log-probability at every temperature.

        Args:
            request: its first prompt is asked for a token.
        """
        tops = []
        for temperature in (request.temperature, 2 * request.temperature):
            body = {**request.body(0), "max_tokens": 1, "temperature": temperature, "logprobs": 1}
            answer = self._call("POST", "/v1/completions", body)
            try:
                tops.append(max(map(float, answer["choices"][0]["logprobs"]["top_logprobs"][0].values())))
            except (LookupError, TypeError, ValueError, AttributeError):
                raise self._wrong("no top_logprobs") from None
        if abs(tops[0] - tops[1]) < 1e-6 and min(tops) < -1e-3:
            raise TrainingError(
                f"sampler_url={self.url} gives log-probabilities as they were before the temperature of "
                f"{request.temperature:g}; start it with --logprobs-mode processed_logprobs"
            )

    def answers(self, request: ServerRequest) -> Sampled:
        """Samples an answer to each prompt.

        Raises:
            Interrupted: if the server is gone, fails or takes too long.
            TrainingError: if it refuses, or an answer is not what was asked for.
        """
        return asyncio.run(self._answers(request))

    async def _answers(self, request: ServerRequest) -> Sampled:
        longest = request.most_tokens + max(map(len, request.prompts))
        most, free = PLAIN_BYTES + TOKEN_BYTES * longest, asyncio.Semaphore(CONCURRENT)

        async def answer(number: int) -> tuple[np.ndarray, np.ndarray, bool]:
            path = "/v1/completions"
            async with free:
                status, text = await self._tried(client, "POST", path, request.body(number), most)
            if status == 404:
                raise Interrupted(f"sampler_url={self.url} has lost the adapter {request.model}; was it restarted?")
            if status != 200:
                raise self._refused(path, status, text)
            return self._checked(self._parsed(text), request, number)

        async with self._client() as client:
            try:
                async with asyncio.timeout(self.limit):
                    answers = await asyncio.gather(*map(answer, range(len(request.prompts))))
            except TimeoutError:
                raise self._slow(self.limit) from None
        return Sampled(*(list(part) for part in zip(*answers, strict=True)))

    def _checked(self, values: Any, request: ServerRequest, number: int) -> tuple[np.ndarray, np.ndarray, bool]:
        """Tokens, log-probabilities and end of an answer, if it is what was asked for."""
        if not isinstance(values, dict) or not isinstance(values.get("choices"), list):
            raise self._wrong("no choices")
        if values.get("model") != request.model:
            raise self._wrong(f"that of {_quoted(str(values.get('model')))} in place of {request.model}: other weights")
        choices = values["choices"]
        if len(choices) != 1 or not isinstance(choices[0], dict):
            raise self._wrong(f"{len(choices)} choices in place of 1")
        tokens, log_probs = choices[0].get("token_ids"), choices[0].get("logprobs")
        log_probs = log_probs.get("token_logprobs") if isinstance(log_probs, dict) else None
        if not isinstance(tokens, list) or not tokens:
            raise self._wrong("no token_ids, which vLLM has from version 0.10.2 on")
        if not all(type(token) is int and 0 <= token < request.vocabulary for token in tokens):
            raise self._wrong(f"token ids outside of the {request.vocabulary:,} of the model")
        if len(tokens) > request.most_tokens:
            raise self._wrong(f"{len(tokens)} tokens, more than {request.most_tokens}")
        if not isinstance(log_probs, list) or len(log_probs) != len(tokens):
            raise self._wrong("not a log-probability for each token")
        if not all(type(value) in (int, float) and _LEAST < value < 1e-3 for value in log_probs):
            raise self._wrong("log-probabilities that are no finite numbers up to 0")
        if choices[0].get("prompt_token_ids") not in (None, request.prompts[number].tolist()):
            raise self._wrong("an answer to another prompt")
        ends = [index for index, token in enumerate(tokens) if token in request.stops]
        if (ends[0] if ends else request.most_tokens - 1) != len(tokens) - 1:
            reason = _quoted(str(choices[0].get("finish_reason")))
            raise self._wrong(f"{len(tokens)} tokens, which end neither at a stop token nor at the limit ({reason})")
        return np.array(tokens, dtype=np.int32), np.array(log_probs, dtype=np.float32), bool(ends)

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    def _models(self) -> list[dict[str, Any]]:
        values = self._call("GET", "/v1/models", None)
        cards = values.get("data") if isinstance(values, dict) else None
        if not isinstance(cards, list) or not all(isinstance(card, dict) for card in cards):
            raise self._wrong("no list of models")
        return cards

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        """The JSON that a request is answered with; None for an empty answer."""
        status, text = asyncio.run(self._single(method, path, body))
        if status != 200:
            raise self._refused(path, status, text)
        return self._parsed(text) if text else None

    async def _single(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, str]:
        async with self._client() as client:
            try:
                async with asyncio.timeout(min(self.limit, SHORT_LIMIT)):
                    return await self._tried(client, method, path, body, PLAIN_BYTES)
            except TimeoutError:
                raise self._slow(min(self.limit, SHORT_LIMIT)) from None

    def _client(self) -> httpx.AsyncClient:
        # Neither proxies nor .netrc of the environment: requests go to this address alone, with this key alone.
        limits = httpx.Limits(max_connections=CONCURRENT, max_keepalive_connections=CONCURRENT)
        return httpx.AsyncClient(
            headers=self._headers, timeout=httpx.Timeout(None, connect=CONNECT), limits=limits, trust_env=False,
            follow_redirects=False, verify=self._verify,
        )  # fmt: skip

    async def _tried(
        self, client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None, most: int
    ) -> tuple[int, str]:
        """Status and text; tries again where no answer comes, or one with status 5xx.

        Raises:
            Interrupted: if no try was answered otherwise.
        """
        cause = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                status, text = await self._sent(client, method, path, body, most)
            except httpx.TransportError as error:
                cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                continue
            if status < 500 or (path.endswith("lora_adapter") and status == 500):  # there it refuses an adapter
                return status, text
            cause = f"status {status}: {_quoted(text)}"
        raise Interrupted(
            f"no answer from sampler_url={self.url}{path} ({without_secrets(cause)}, {ATTEMPTS} times); see whether "
            "the server runs, and its log"
        )

    async def _sent(
        self, client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None, most: int
    ) -> tuple[int, str]:
        async with client.stream(method, self.url + path, json=body) as response:
            if response.is_redirect:
                raise self._wrong(f"a redirect to {_quoted(response.headers.get('location', ''))}")
            received = bytearray()
            async for part in response.aiter_raw():
                received += part
                if len(received) > most:
                    raise self._wrong(f"more than {most:,} bytes")
            return response.status_code, received.decode(errors="replace")

    def _parsed(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise self._wrong(f"no JSON: {_quoted(text)}") from None

    def _refused(self, path: str, status: int, text: str) -> TrainingError:
        remedy = f"set {API_KEY} to its key" if status in (401, 403) else "see its log"
        return TrainingError(f"sampler_url={self.url}{path} refuses (status {status}: {_quoted(text)}); {remedy}")

    def _wrong(self, fault: str) -> TrainingError:
        return TrainingError(f"sampler_url={self.url} answers with {fault}; is it vLLM, and nothing between?")

    def _slow(self, limit: float) -> Interrupted:
        return Interrupted(
            f"sampler_url={self.url} has not answered within {limit:g} s; see its log, and give it more GPUs or "
            "fewer answers (num_generations, global_batch_size, max_completion_length)"
        )


def _quoted(text: str) -> str:
    """The start of what the server says, in one printable line without secrets."""
    line = "".join(letter if letter.isprintable() else " " for letter in without_secrets(text[:2000]))
    return repr(line if len(line) <= 300 else line[:300] + "...")
