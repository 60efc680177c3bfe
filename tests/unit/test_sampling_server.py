"""The client of a sampling server against a stand-in: what it gets, and what it refuses by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import trainers.sampling_server
from tests.launching import free_port
from tests.sampling_server import Running, serving
from trainers.config.sampler import API_KEY
from trainers.embedded import BASE_DIR
from trainers.run.errors import Interrupted, TrainingError
from trainers.sampling_server import SamplingServer, ServerRequest

SOUND: dict[str, Any] = {
    "fault": "none", "after": 0, "enable_lora": True, "max_lora_rank": 16, "max_model_len": 2048, "runtime": True,
    "api_key": None, "logprobs_mode": "raw_logprobs", "raw": None, "choice": {}, "answer": {},
}  # fmt: skip
PROMPTS = [np.array([5, 6, 7]), np.array([9, 10]), np.array([5, 6, 7])]
MOST, STOPS = 6, [2]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(BASE_DIR, "--enable-lora") as server:
        yield server


@pytest.fixture
def server(running: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A sound one; a test may change it."""
    monkeypatch.setattr(trainers.sampling_server, "PAUSE", 0.01)
    monkeypatch.delenv(API_KEY, raising=False)
    running.set(**SOUND)
    yield running
    running.set(**SOUND)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters as peft saves them, which change the model much; the third has too high a rank."""
    folders = []
    for number, rank in enumerate((4, 4, 32)):
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_pretrained(BASE_DIR, dtype=torch.float32)
        adapted: Any = get_peft_model(model, LoraConfig(r=rank, lora_alpha=64, target_modules="all-linear"))
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.05)
        folders.append(tmp_path_factory.mktemp("adapter") / str(number))
        adapted.save_pretrained(folders[-1])
    return folders


@pytest.fixture
def loaded(server: Running, adapters: list[Path]) -> tuple[Running, SamplingServer]:
    """A server with the first adapter, named `a`."""
    client = SamplingServer(server.url, 60)
    if "a" not in client.check([str(BASE_DIR)], 192):
        client.load("a", adapters[0])
    return server, client


def asked(name: str = "a", temperature: float = 1.0, seeds: tuple[int, ...] = (1, 2, 3)) -> ServerRequest:
    return ServerRequest(name, PROMPTS, seeds, temperature, MOST, STOPS, 4096)


def refusal(client: SamplingServer, **changes: Any) -> str:
    with pytest.raises(TrainingError) as caught:
        client.answers(asked(**changes))
    return str(caught.value)


def test_answers_are_those_of_the_adapter(loaded: tuple[Running, SamplingServer], adapters: list[Path]) -> None:
    _, client = loaded
    answers = client.answers(asked())
    base = AutoModelForCausalLM.from_pretrained(BASE_DIR, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(adapters[0])).eval()
    for prompt, tokens, log_probs, ended in zip(PROMPTS, answers.tokens, answers.log_probs, answers.ended, strict=True):
        ids = torch.tensor([[*prompt.tolist(), *tokens.tolist()]])
        with torch.no_grad():
            own = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = own.gather(1, torch.from_numpy(tokens).long()[:, None])[:, 0]
        assert np.abs(wanted.numpy() - log_probs).max() < 1e-4
        assert ended == (tokens[-1] in STOPS)
        assert ended or len(tokens) == MOST
    again = client.answers(asked())
    assert [tokens.tolist() for tokens in again.tokens] == [tokens.tolist() for tokens in answers.tokens]
    other = client.answers(asked(seeds=(4, 5, 6)))
    assert [tokens.tolist() for tokens in other.tokens] != [tokens.tolist() for tokens in answers.tokens]
    greedy = client.answers(asked(temperature=0.0))
    assert greedy.tokens[0].tolist() == greedy.tokens[2].tolist(), "the same prompt, whatever the seed"


def test_another_adapter_gives_other_answers(loaded: tuple[Running, SamplingServer], adapters: list[Path]) -> None:
    _, client = loaded
    client.load("b", adapters[1])
    first, second = client.answers(asked("a", 0.0)), client.answers(asked("b", 0.0))
    assert [tokens.tolist() for tokens in first.tokens] != [tokens.tolist() for tokens in second.tokens]
    client.load("b", adapters[1])  # as after an answer that was lost
    assert client.check([str(BASE_DIR)], 2048) == ["a", "b"]
    client.unload("b")
    client.unload("b")
    assert "has lost the adapter b; was it restarted?" in refusal(client, name="b")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_model_len": 100}, "has a context of 100 tokens, and max_length is 192; start it with --max-model-len"),
        ({"model": "/other", "served_model_name": "other/model"}, "serves 'other/model', and this run trains"),
        ({"api_key": "secret-of-the-server"}, f'status 401: \'{{"error": "Unauthorized"}}\'); set {API_KEY}'),
    ],
)
def test_a_server_that_does_not_fit_is_named(settings: dict[str, Any], sentence: str, server: Running) -> None:
    server.set(**settings)
    try:
        with pytest.raises(TrainingError) as caught:
            SamplingServer(server.url, 60).check([str(BASE_DIR)], 192)
        assert sentence in str(caught.value)
    finally:
        server.set(model=str(BASE_DIR), served_model_name=None)
    server.set(**SOUND)
    SamplingServer(server.url + "/v1/", 60).check([str(BASE_DIR)], 192)  # control


def test_the_key_comes_from_the_environment(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    server.set(api_key="secret-of-the-server")
    monkeypatch.setenv(API_KEY, "secret-of-the-server\n")
    SamplingServer(server.url, 60).check([str(BASE_DIR)], 192)
    monkeypatch.setenv(API_KEY, "secret-of\nthe-server")
    with pytest.raises(TrainingError, match=f"{API_KEY} holds a character") as caught:
        SamplingServer(server.url, 60)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "number", "sentence"),
    [
        ({"runtime": False}, 0, "cannot load adapters at runtime; start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
        ({"enable_lora": False}, 0, "LoRA is not enabled."),
        ({}, 2, "LoRA rank 32 is greater than max_lora_rank 16."),
        ({}, -1, "No adapter found for"),
    ],
)
def test_an_adapter_that_is_not_loaded_is_named(
    settings: dict[str, Any], number: int, sentence: str, server: Running, adapters: list[Path]
) -> None:
    server.set(**settings)
    with pytest.raises(TrainingError) as caught:
        SamplingServer(server.url, 60).load("c", adapters[number] if number >= 0 else Path("/no/such"))
    assert sentence in str(caught.value)
    assert "--enable-lora" in str(caught.value)


def test_log_probabilities_before_the_temperature_are_refused(loaded: tuple[Running, SamplingServer]) -> None:
    server, client = loaded
    with pytest.raises(TrainingError, match="--logprobs-mode processed_logprobs"):
        client.refuse_raw(asked(temperature=0.7))
    server.set(logprobs_mode="processed_logprobs")
    client.refuse_raw(asked(temperature=0.7))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"choice": {"token_ids": None}}, "no token_ids, which vLLM has from version 0.10.2 on"),
    ({"choice": {"token_ids": []}}, "no token_ids"),
    ({"choice": {"token_ids": [5, 99999]}}, "token ids outside of the 4,096 of the model"),
    ({"choice": {"token_ids": [5, -1]}}, "token ids outside"),
    ({"choice": {"token_ids": [5, True]}}, "token ids outside"),
    ({"choice": {"token_ids": [5] * (MOST + 1)}}, "7 tokens, more than 6"),
    ({"choice": {"token_ids": [5] * MOST, "logprobs": None}}, "not a log-probability for each token"),
    ({"choice": {"token_ids": [5] * MOST, "logprobs": {"token_logprobs": [-1.0]}}}, "not a log-probability for each"),
    ({"choice": {"token_ids": [5] * MOST, "logprobs": {"token_logprobs": [float("nan")] * MOST}}}, "no finite numbers"),
    ({"choice": {"token_ids": [5] * MOST, "logprobs": {"token_logprobs": [-float("inf")] * MOST}}}, "no finite"),
    ({"choice": {"token_ids": [5] * MOST, "logprobs": {"token_logprobs": [1.0] * MOST}}}, "no finite numbers up to 0"),
    ({"choice": {"token_ids": [5] * MOST, "logprobs": {"token_logprobs": ["-1"] * MOST}}}, "no finite numbers"),
    ({"choice": {"token_ids": [5, 5], "logprobs": {"token_logprobs": [-1, -1]}}}, "2 tokens, which end neither"),
    ({"choice": {"token_ids": [2, 5], "logprobs": {"token_logprobs": [-1, -1]}}}, "2 tokens, which end neither"),
    ({"choice": {"prompt_token_ids": [1]}}, "an answer to another prompt"),
    ({"answer": {"choices": []}}, "0 choices in place of 1"),
    ({"answer": {"choices": [{}, {}]}}, "2 choices in place of 1"),
    ({"answer": {"choices": "text"}}, "no choices"),
    ({"fault": "other-name"}, "that of 'another' in place of a: other weights"),
    ({"raw": {"status": 200, "content": "{"}}, "no JSON: '{'"),
    ({"raw": {"status": 200, "content": "[" * 100_000}}, "no JSON"),
    ({"raw": {"status": 200, "content": "null"}}, "no choices"),
    ({"raw": {"status": 200, "content": " " * 3_000_000}}, "more than 1,057,792 bytes"),
    ({"raw": {"status": 200, "content": "x", "headers": {"Content-Encoding": "gzip"}}}, "no JSON: 'x'"),
    ({"raw": {"status": 307, "content": "", "headers": {"Location": "http://elsewhere/"}}}, "a redirect to"),
    ({"raw": {"status": 400, "content": "bad \x1b[31m request"}}, "refuses (status 400: 'bad  [31m request')"),
]


@pytest.mark.parametrize(("settings", "sentence"), WRONG)
def test_an_answer_that_is_not_what_was_asked_is_refused(
    settings: dict[str, Any], sentence: str, loaded: tuple[Running, SamplingServer]
) -> None:
    server, client = loaded
    server.set(**settings)
    text = refusal(client)
    assert sentence in text
    assert text.startswith(f"sampler_url={server.url}")
    assert text.isprintable()


def test_a_status_4xx_is_asked_once_and_5xx_again(loaded: tuple[Running, SamplingServer]) -> None:
    server, client = loaded
    for status, times in ((400, 1), (503, trainers.sampling_server.ATTEMPTS)):
        server.set(raw={"status": status, "content": "no"})
        before = len(server.names("completions"))
        error = Interrupted if status == 503 else TrainingError
        with pytest.raises(error, match=f"status {status}: 'no'"):
            client.answers(replace(asked(), prompts=asked().prompts[:1], seeds=asked().seeds[:1]))
        server.set(raw=None)
        assert len(server.names("completions")) - before == times


def test_a_request_that_fails_is_tried_again(loaded: tuple[Running, SamplingServer]) -> None:
    server, client = loaded
    before = client.answers(asked())
    server.set(fault="flaky")
    for _ in range(3):
        after = client.answers(asked())
        assert [tokens.tolist() for tokens in after.tokens] == [tokens.tolist() for tokens in before.tokens]


def test_a_server_that_does_not_answer_in_time_is_named(loaded: tuple[Running, SamplingServer]) -> None:
    server, _ = loaded
    server.set(fault="hang")
    with pytest.raises(Interrupted, match="has not answered within 1 s; see its log"):
        SamplingServer(server.url, 1).answers(asked())


def test_nobody_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers.sampling_server, "PAUSE", 0.01)
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(Interrupted, match=rf"no answer from sampler_url={url}/health \(ConnectError") as caught:
        SamplingServer(url, 60).check([str(BASE_DIR)], 192)
    assert "see whether the server runs" in str(caught.value)
