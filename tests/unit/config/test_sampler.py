"""Which addresses and which runs a server that samples may have, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from trainers.config.mistakes import ConfigError
from trainers.config.validation import build, ignored_choices
from trainers.run.compatibility import plain, recorded_versions, refusals
from trainers.strategy.strategy import load_strategy, refusal

URL = "http://127.0.0.1:8000"
GRPO: dict[str, Any] = {
    "model_name_or_path": "embedded", "dataset_name": "embedded", "objective": "grpo", "method": "lora",
    "sampler_url": URL, "global_batch_size": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("127.0.0.1:8000", "is not an http(s) address"),
        ("file:///etc/passwd", "is not an http(s) address"),
        ("http://", "is not an http(s) address"),
        ("http://[::1", "is not an address"),
        ("http://host:99999", "is not an address"),
        ("http://user:secret@host:8000", "holds credentials; leave them out and set TUNESMITH_SAMPLER_API_KEY"),
        ("http://host:8000/?key=secret", "has a query or a fragment"),
        ("http://host:8000/#secret", "has a query or a fragment"),
        ("http://host:8000/a b", "holds a space"),
        ("http://xn--:8000", "has no valid name of a host"),
        ("http://ex\u00e4mple_:8000", "has no valid name of a host"),
    ],
)
def test_an_address_that_is_refused(url: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build({**GRPO, "sampler_url": url})
    assert "sampler_url" in str(caught.value)
    assert sentence in str(caught.value)
    assert "secret" not in str(caught.value) or "#" in url


@pytest.mark.parametrize("url", [URL, "https://host", "http://[::1]:8000/prefix/v1"])
def test_an_address_that_is_not(url: str) -> None:
    assert build({**GRPO, "sampler_url": url}).sampler_url == url


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": "full"}, "method=full with sampler_url: the server gets an adapter, not all weights"),
        ({"method": "qlora"}, "method=qlora with sampler_url: the adapter is trained on a base in 4 bits"),
        ({"random_init": True, "merge_adapter": True}, "random_init=true with sampler_url: the server has the pre"),
        ({"lora_rank_pattern": "q_proj=4"}, "lora_rank_pattern=q_proj=4 with sampler_url: the server scales"),
        ({"lora_alpha_pattern": "q_proj=4"}, "lora_alpha_pattern=q_proj=4.0 with sampler_url: the server scales"),
        ({"lora_target_parameters": "e.w"}, "lora_target_parameters=e.w with sampler_url: the server adds adapters to"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa with sampler_url: the server adds adapters to the"),
        ({"new_tokens": "<a>"}, "new_tokens=<a> with sampler_url: the server has the vocabulary of its base"),
        ({"use_dora": True}, "use_dora=true with sampler_url: the server adds adapters of plain LoRA"),
        ({"modules_to_save": "lm_head"}, "modules_to_save=lm_head with sampler_url: the server adds adapters"),
        ({"num_hidden_layers": 1}, "num_hidden_layers=1 with sampler_url: the server has all layers"),
        ({"rope_scaling": "linear", "rope_factor": 2.0}, "rope_scaling=linear with sampler_url: the server has the"),
        ({"recorded_answers": "x"}, "recorded_answers and sampler_url are both set"),
    ],
)
def test_a_run_that_the_server_would_have_other_weights_for(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build({**GRPO, **changes})
    assert sentence in str(caught.value)
    build({**GRPO, **changes, "sampler_url": None})  # control


def test_other_objectives_ignore_it() -> None:
    config = build({**GRPO, "objective": "sft", "sampler_url": "nonsense"})
    assert [str(line) for line in ignored_choices(config)] == ["sampler_url is ignored: objective=sft does not read it"]


def test_compiled_layers_need_not_sample() -> None:
    build({**GRPO, "torch_compile": True})
    with pytest.raises(ConfigError, match="compiled layers do not sample"):
        build({**GRPO, "torch_compile": True, "sampler_url": None})


@pytest.mark.parametrize("name", ["tp", "cp", "sp", "pp", "ep"])
def test_only_data_parallel_ranks_answer_prompts(name: str) -> None:
    answers = {"eval_dataset_name": "embedded", "eval_generate_steps": 5, "eval_answer_tokens": 9}
    config = build({**GRPO, "objective": "sft", **answers})
    problem = refusal(load_strategy(name), config, has_gpu=False)
    assert "only data-parallel ranks answer prompts; use fsdp2, for instance" in str(problem)
    without = config.model_copy(update={"eval_generate_steps": 0})
    for other in (refusal(load_strategy("fsdp2"), config, False), refusal(load_strategy(name), without, False)):
        assert "answer prompts" not in str(other), "control"


@pytest.mark.parametrize("name", ["tp", "cp", "sp", "fsdp2_tp"])
def test_meshes_that_do_not_sample_train_with_a_server(name: str) -> None:
    evaluated = {**GRPO, "eval_dataset_name": "embedded"}
    assert refusal(load_strategy(name), build(evaluated), has_gpu=False) is None
    problem = refusal(load_strategy(name), build({**evaluated, "sampler_url": None}), has_gpu=False)
    assert problem is not None
    assert "only data-parallel ranks sample answers; use fsdp2, a server (sampler_url)" in problem


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("ep", {}, "not tested with a server"),
        ("sp", {"steps_per_generation": 2}, "steps_per_generation=2 with sp 2: ranks that share a row"),
        ("tp", {"steps_per_generation": 2}, ""),
    ],
)
def test_what_a_server_does_not_help(name: str, changes: dict[str, Any], sentence: str) -> None:
    problem = refusal(load_strategy(name), build({**GRPO, **changes}), has_gpu=False)
    assert problem is None if not sentence else sentence in str(problem)


def test_pipelines_are_refused_all_the_same() -> None:
    problem = refusal(load_strategy("pp"), build(GRPO), has_gpu=False)
    assert problem is not None
    assert "pipelines sum over tokens" in problem


def test_on_a_resume_a_server_may_move_but_not_come_or_go() -> None:
    config = build(GRPO)
    manifest = {"config": plain(config), "versions": recorded_versions(config), "step": 3}
    for url, count in ((URL, 0), ("http://elsewhere:1", 0), (None, 1)):
        changed = refusals(manifest, plain(build({**GRPO, "sampler_url": url})), recorded_versions(config))
        assert len(changed) == count
