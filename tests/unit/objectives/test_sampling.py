"""Answers are drawn from the model's distribution, whatever stands beside them in a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedModel

from trainers.data.layout import MetadataRoute
from trainers.objectives.sampling import SampleRequest, _Choose, running_sum, sample, uniforms

SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}  # fmt: skip
PROMPTS = [np.array([3, 5, 7]), np.array([11]), np.array([2, 4, 6, 8, 10, 12])]


def build(kind: str = "llama") -> PreTrainedModel:
    torch.manual_seed(0)
    mixtral = MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SMALL) if kind == "llama" else mixtral).eval()


def request(  # type: ignore[no-untyped-def]
    numbers: list[int],
    most_tokens: int = 12,
    greedy: bool = False,
    stops: tuple[int, ...] = (1,),
    temperature: float = 1.0,
):
    randoms = None if greedy else uniforms(7, 3, np.array(numbers), most_tokens)
    return SampleRequest([PROMPTS[number] for number in numbers], randoms, temperature, most_tokens, stops, 1, False)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 4096, 5001])
def test_running_sums(count: int) -> None:
    values = torch.rand(3, count, dtype=torch.float64)
    assert torch.allclose(running_sum(values), values.cumsum(-1), rtol=1e-12)


def test_tokens_are_drawn_in_proportion() -> None:
    """Evenly spread uniform numbers give each token its share."""
    shares = torch.tensor([0.5, 0.0, 0.3, 0.2])
    numbers = (torch.arange(1000, dtype=torch.float64)[:, None] + 0.5) / 1000
    scores = shares.log().repeat(1000, 1)
    chosen = _Choose(numbers, 1.0)(torch.zeros(1000, 0), scores).argmax(-1)
    assert chosen.bincount(minlength=4).tolist() == [500, 0, 300, 200]
    sharper = _Choose(numbers, 0.5)(torch.zeros(1000, 0), scores).argmax(-1)  # 0.25, 0, 0.09 and 0.04 of 0.38
    assert sharper.bincount(minlength=4).tolist() == [658, 0, 237, 105]


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_an_answer_is_the_same_alone_and_in_a_batch(kind: str) -> None:
    model, device = build(kind), torch.device("cpu")
    together = sample(model, request([0, 1, 2]), device)
    for number in range(3):
        alone = sample(model, request([number]), device)
        assert alone.tokens[0].tolist() == together.tokens[number].tolist()
    other = SampleRequest(PROMPTS, uniforms(8, 3, np.arange(3), 12), 1.0, 12, (1,), 1, False)
    assert [tokens.tolist() for tokens in sample(model, other, device).tokens] != [
        tokens.tolist() for tokens in together.tokens
    ], "control: another seed"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_of_the_model(temperature: float) -> None:
    model = build()
    answers = sample(model, request([0, 2], temperature=temperature), torch.device("cpu"))
    for prompt, tokens, values in zip([PROMPTS[0], PROMPTS[2]], answers.tokens, answers.log_probs, strict=True):
        ids = torch.tensor(np.concatenate([prompt, tokens]))[None]
        log_probs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float() / temperature, -1)
        of_tokens = log_probs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
        assert np.allclose(values, of_tokens.detach().numpy(), atol=1e-5)


def test_an_answer_ends_with_the_first_stop_token_or_is_cut() -> None:
    model = build()
    cut = sample(model, request([0], most_tokens=5, stops=(60,)), torch.device("cpu"))
    assert (len(cut.tokens[0]), cut.ended) == (5, [60 in cut.tokens[0].tolist()])
    stop = int(cut.tokens[0][2])
    ended = sample(model, request([0], most_tokens=5, stops=(stop,)), torch.device("cpu"))
    first = cut.tokens[0].tolist().index(stop)
    assert ended.tokens[0].tolist() == cut.tokens[0][: first + 1].tolist()
    assert ended.ended == [True]


def test_the_most_likely_answer_has_no_chance_in_it() -> None:
    model = build()
    first, second = (sample(model, request([0, 1], greedy=True), torch.device("cpu")) for _ in range(2))
    assert [tokens.tolist() for tokens in first.tokens] == [tokens.tolist() for tokens in second.tokens]


def test_the_model_is_left_as_it_was_and_sees_no_documents() -> None:
    model = build("mixtral")
    before, generation = model.config._attn_implementation, model.generation_config
    MetadataRoute.current = object()  # type: ignore[assignment]
    sample(model, request([0, 1]), torch.device("cpu"))
    assert MetadataRoute.current is None
    assert model.config._attn_implementation == before
    assert model.generation_config is generation
    assert model.config.output_router_logits is True
