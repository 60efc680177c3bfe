"""Metrics by hand-computed cases and against their packages; requests that cannot be computed."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.eval import metrics
from app.eval.corpus import bleu, chrf
from app.eval.metrics import (
    ANSWER_METRICS,
    answer_sums,
    check_metrics,
    default_metrics,
    exact_match,
    f1,
    is_json,
    loss_sums,
    rouge_l,
    row_values,
)
from app.eval.rows import Row
from app.eval.statistics import point
from trainers.config.mistakes import ConfigError


def row(
    expected: str = "yes", answer: str | None = "yes", loss: float = 1.0, tokens: int = 2, name: str = "data:1",
    source: str | None = None,
) -> Row:  # fmt: skip
    return Row(name, source, loss, tokens, "Is it?", expected, answer, True, len(expected))


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [
        ("The cat sat.", "a cat sat", 1.0),
        ("the cat sat on a mat", "the cat", 2 * (1 / 4) * 1 / (1 / 4 + 1)),  # cat sat on mat; cat
        ("cat cat", "cat dog cat cat", 2 * 1 * (2 / 4) / (1 + 2 / 4)),
        ("dog", "cat", 0.0),
        ("", "", 1.0),
        ("the", "", 1.0),
        ("the", "cat", 0.0),
        ("cat", "", 0.0),
        ("U.S.A.", "usa", 1.0),
        ("theatre", "the atre", 0.0),
        ("É", "é", 1.0),
    ],
)
def test_f1_by_hand(answer: str, expected: str, score: float) -> None:
    assert f1(answer, expected) == pytest.approx(score)


def test_exact_match_ignores_space_around_alone() -> None:
    assert [exact_match(text, "yes\n") for text in (" yes", "Yes", "y es", "")] == [1.0, 0.0, 0.0, 0.0]


def test_rouge_l_by_hand_and_in_other_scripts() -> None:
    """Control: the words of rouge-score itself, by which no two Russian texts are alike."""
    from rouge_score.rouge_scorer import RougeScorer

    texts = [("police killed the gunman", "police kill the gunman"), ("кот спит", "кот спит"), ("", "a")]
    got = rouge_l([answer for answer, _ in texts], [wanted for _, wanted in texts])
    assert got == pytest.approx([0.75, 1.0, 0.0])
    assert RougeScorer(["rougeL"]).score("кот спит", "кот спит")["rougeL"].fmeasure == 0.0


ASCII = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30)


@settings(max_examples=100, deadline=None)
@given(ASCII, ASCII)
def test_rouge_l_of_ascii_is_that_of_the_package(answer: str, expected: str) -> None:
    from rouge_score.rouge_scorer import RougeScorer

    assert rouge_l([answer], [expected]) == [RougeScorer(["rougeL"]).score(expected, answer)["rougeL"].fmeasure]


TEXT = st.lists(st.sampled_from(["the", "cat", "sat.", "on,", "a", "mat", "日本", "é", "\n"]), max_size=9).map(" ".join)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5))
def test_corpus_metrics_are_those_of_sacrebleu(texts: list[tuple[str, str]]) -> None:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    answers, expected = [answer for answer, _ in texts], [wanted for _, wanted in texts]
    assert point(bleu(answers, expected)) == pytest.approx(BLEU().corpus_score(answers, [expected]).score)
    assert point(chrf(answers, expected)) == pytest.approx(CHRF().corpus_score(answers, [expected]).score)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"a": [1, null, "\\u00e9"]}', 1.0), (" 1 ", 1.0), ('"a"', 1.0), ("NaN", 0.0), ("[-Infinity]", 0.0), ("", 0.0),
        ("{'a': 1}", 0.0), ('```json\n{"a": 1}\n```', 0.0), ('{"a": 1} and', 0.0), ('{"a": 1, "a": 2}', 0.0),
        ("[1,]", 0.0), ("01", 0.0), ("[" * 10**5, 0.0), ("\ufeff{}", 0.0),
    ],
)  # fmt: skip
def test_json_is_strict(text: str, valid: float) -> None:
    assert is_json(text) == valid


def test_a_schema_is_compared_as_a_reward_does(tmp_path: Path) -> None:
    from trainers.rewards.functions import json_schema

    schema = {"type": "object", "properties": {"age": {"type": "number", "multipleOf": 0.01}}, "required": ["age"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    answers = ['{"age": 3}', '{"age": "3"}', "{}", "3", '{"age": 1e999}', '{"age": NaN}']
    got = row_values("json_schema", answers, [""] * 6, str(tmp_path / "schema.json"))
    assert got == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0] == json_schema(schema)(completions=answers)


def test_losses_are_ratios_of_sums() -> None:
    rows = [row("abcd", loss=3.0, tokens=1), row("abcdefgh", loss=1.0, tokens=7)]
    assert point(loss_sums("loss", rows)) == pytest.approx(0.5)
    assert point(loss_sums("perplexity", rows)) == pytest.approx(math.exp(0.5))
    assert point(loss_sums("bits_per_character", rows)) == pytest.approx(4 / math.log(2) / 12)


def test_every_metric_of_answers_has_a_value(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text("{}")
    rows = [row("[1, 2, 3, 4]", "[1, 2, 3, 4]"), row("[5, 6, 7, 8]", "[5, 6, 7, 8]")]
    values = {name: point(answer_sums(name, rows, str(tmp_path / "schema.json"))) for name in ANSWER_METRICS}
    assert values == pytest.approx({name: 100.0 if name in ("bleu", "chrf") else 1.0 for name in ANSWER_METRICS})


LONG = "a text of more than four words"


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([row(), row()], "loss perplexity exact_match f1"),
        ([row(LONG), row(LONG), row()], "loss perplexity exact_match f1 rouge_l bleu chrf"),
        ([row(LONG, tokens=0)], "exact_match f1 rouge_l bleu chrf"),
        ([row(LONG, answer=None)], "loss perplexity"),
        ([row('{"a": 1}'), row("[]")], "loss perplexity exact_match f1 json"),
        ([row('{"a": 1}'), row("1")], "loss perplexity exact_match f1"),
        ([], ""),
    ],
)
def test_the_metrics_that_fit_the_rows(rows: list[Row], wanted: str) -> None:
    assert default_metrics(rows) == wanted.split()


def hide(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == package else find(name, *more))
    monkeypatch.setitem(sys.modules, package, None)


def test_a_missing_package_leaves_its_metric_out_or_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hide("sacrebleu", monkeypatch)
    assert default_metrics([row(LONG)]) == ["loss", "perplexity", "exact_match", "f1", "rouge_l"]
    with pytest.raises(ConfigError) as caught:
        check_metrics(["chrf", "f1"], None)
    assert str(caught.value) == 'metrics=chrf needs the package sacrebleu; pip install -e ".[eval]"'
    hide("scipy", monkeypatch)
    with pytest.raises(ConfigError, match=r'need the package scipy; pip install -e "\.\[eval\]"'):
        check_metrics(None, None)


@pytest.mark.parametrize(
    ("names", "schema", "sentence"),
    [
        (["bleau"], None, "metrics=bleau is no metric; did you mean bleu?"),
        (["zzz"], None, "is no metric; use loss, perplexity"),
        (["f1", "f1"], None, "metrics=f1,f1 has a metric twice; name each once"),
        (["json_schema"], None, "metric_schema is not set, and the metric json_schema needs it; name its file"),
        (None, "{", "is no JSON Schema: Expecting property name"),
        (["json_schema"], '{"$ref": "https://example.com/a"}', "which it does not hold, and nothing is fetched"),
    ],
)
def test_requests_that_cannot_be_computed(
    names: list[str] | None, schema: str | None, sentence: str, tmp_path: Path
) -> None:
    path = None
    if schema is not None:
        (tmp_path / "schema.json").write_text(schema)
        path = str(tmp_path / "schema.json")
    with pytest.raises(ConfigError) as caught:
        check_metrics(names, path)
    assert sentence in str(caught.value)
    assert "reward" not in str(caught.value)


def test_what_can_be_computed_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text("{}")
    check_metrics([*metrics.LOSS_METRICS, *ANSWER_METRICS, "own.py:f"], str(tmp_path / "schema.json"))
    check_metrics(None, None)
