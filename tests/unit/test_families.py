"""The verdict of `--check` is the run's, and its advice holds; all families by `python -m benchmarks.families`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.families import judge
from tests.families import FAMILIES, Verdict, config_for, disagreement, save_small
from tests.parity.runs import mostly_long
from trainers.config.mistakes import ConfigError
from trainers.model.load import build_model
from trainers.strategy.strategy import load_strategy
from trainers.tools.preflight import check

SAMPLE = ("llama", "gpt2", "bloom", "mamba", "bert", "xmod", "phimoe", "deepseek_v4")
"""Trained packed; other linear layers; unpacked alone; no attention; refused; failing by itself; a router that is a
linear layer; a linear layer of another product."""


def hold(found: dict[str, Any]) -> None:
    """Asserts that check and run agree on a family, for which there must be a small model.

    Args:
        found: what `judge` gives.
    """
    assert found["unknown"] is None, f"no small {found['family']} model: {found['unknown']}"
    wrong = [verdict for verdict in found["verdicts"] if verdict["fault"] is not None]
    assert not wrong, json.dumps(wrong, indent=1)
    assert len(found["verdicts"]) == 4


@pytest.mark.parametrize("family", mostly_long(SAMPLE, ["llama", "bert", "deepseek_v4"]))
def test_check_and_run_agree(family: str) -> None:
    hold(judge(family))


def test_a_family_without_a_small_model_is_a_fault() -> None:
    """Control: nothing would be tried of it, and nothing would show that."""
    agreed = {"fault": None}
    hold({"family": "llama", "unknown": None, "verdicts": [agreed] * 4})
    with pytest.raises(AssertionError, match="no small llama model: KeyError: 'x'"):
        hold({"family": "llama", "unknown": "KeyError: 'x'", "verdicts": []})


@pytest.mark.long
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SAMPLE])
def test_check_and_run_agree_for_every_family(family: str) -> None:
    found = judge(family)
    if found["unknown"] is not None:
        pytest.skip(f"no small {family} model: {found['unknown']}")
    hold(found)


def test_a_verdict_that_differs_is_a_fault() -> None:
    """Control: so is a crash that both of them meet."""
    for said in (
        ("ok", "llama is too old; use another"),
        ("no", "nay"),
        ("ok", "KeyError: 'x'"),
        ("KeyError: 'x'",) * 2,
    ):
        assert disagreement(Verdict("llama", "full", True, *said))
    assert disagreement(Verdict("llama", "full", True, "ok", "ok")) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_target_modules": ["nope"]}, "lora_target_modules=nope matches no module"),
        ({"lora_target_modules": ["lm_head"], "merge_adapter": True}, "merge_adapter=true with an adapter on tied"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_by_the_check(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    config = config_for(save_small(tmp_path, tie_word_embeddings=True), method="lora", **changes)
    with pytest.raises(ConfigError, match=message) as early:
        check(config, load_strategy("single"), has_gpu=False)
    with pytest.raises(ConfigError) as late:
        build_model(config)
    assert early.value.lines == late.value.lines
