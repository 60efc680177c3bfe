"""The document of an evaluation, from files of rows to its tables."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from app.eval.comparison import Settings, compare
from app.eval.report import comparison_line, print_comparison
from app.eval.rows import Row, align, read_rows
from trainers.config.mistakes import ConfigError


def made(count: int, seed: int, right: float = 0.5, gain: float = 0.0) -> list[Row]:
    """Rows of two sources; a model that is right on a share of them, with a loss that is lower by `gain`."""
    draw = random.Random(seed)
    difficulties = random.Random(0)
    rows = []
    for number in range(count):
        tokens, difficulty = difficulties.randint(3, 30), difficulties.random()
        answer = f"answer {number}" if draw.random() < right else "something else"
        loss = tokens * (1 + difficulty - gain + 0.05 * draw.gauss(0, 1))
        source = ("math", "chat")[number % 2]
        rows.append(
            Row(
                f"data:{number}",
                source,
                loss,
                tokens,
                f"Question {number}?",
                f"answer {number}",
                answer,
                True,
                len(f"answer {number}"),
            )
        )
    return rows


def entry(entries: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The single entry with some values."""
    (match,) = [each for each in entries if all(each[key] == value for key, value in wanted.items())]
    return match


def test_the_document_has_every_metric_of_every_model_and_source() -> None:
    document = compare({"base": made(80, 1), "tuned": made(80, 2, right=0.9, gain=0.2)})
    assert document["metrics"] == ["loss", "perplexity", "exact_match", "f1"]
    assert {(each["model"], each["source"], each["metric"]) for each in document["rows"]} == {
        (model, source, metric)
        for model in ("base", "tuned") for source in (None, "math", "chat") for metric in document["metrics"]
    }  # fmt: skip
    assert len(document["comparisons"]) == 3 * 4
    for metric, better in (("exact_match", 1), ("f1", 1), ("loss", -1), ("perplexity", -1)):
        got = entry(document["comparisons"], metric=metric, source=None)
        assert (got["a"], got["b"], got["significant"], got["rows"]) == ("base", "tuned", True, 80)
        assert got["difference"] * better > 0
        assert got["low"] < got["difference"] < got["high"]
        values = [entry(document["rows"], model=name, metric=metric, source=None) for name in ("base", "tuned")]
        assert got["difference"] == pytest.approx(values[1]["value"] - values[0]["value"])
        assert values[0]["low"] < values[0]["value"] < values[0]["high"]
    assert document["notes"] == []
    json.dumps(document, allow_nan=False)


def test_one_source_is_not_listed_by_itself_and_the_second_model_may_be_absent() -> None:
    rows = [replace(row, source="math") for row in made(10, 1)]
    document = compare({"base": rows})
    assert {each["source"] for each in document["rows"]} == {None}
    assert document["comparisons"] == document["changed"] == []


def test_a_model_is_not_told_apart_from_itself_whatever_the_order_of_rows() -> None:
    rows = made(60, 1)
    shuffled = random.Random(3).sample(rows, 60)
    document = compare({"base": rows, "again": shuffled})
    assert not any(each["significant"] for each in document["comparisons"])
    assert {each["difference"] for each in document["comparisons"]} == {0.0}
    assert document["changed"] == []


def test_rows_of_one_name_are_aligned_by_their_order() -> None:
    rows = [replace(row, row="data:1", source=None, expected=f"{at}") for at, row in enumerate(made(3, 1))]
    other = [rows[0], replace(rows[1], row="data:2"), rows[2]]
    pair = align(rows, other)
    assert (len(pair.a), pair.only_a, pair.only_b, pair.unlike) == (1, 1, 1, 1)
    assert pair.a == pair.b == rows[:1]
    of_sources = [replace(row, source=f"{at}") for at, row in enumerate(rows)]  # files of one name in a mix
    pair = align(of_sources, of_sources[1:])
    assert (pair.a, pair.only_a, pair.only_b, pair.unlike) == (of_sources[1:], 1, 0, 0)
    spaced = [replace(row, expected=f" {row.expected}") for row in rows]  # as another tokenizer decodes it
    assert len(align(rows, spaced).a) == 3


def test_what_a_model_lacks_is_left_out_and_said() -> None:
    """Control: with these rows, the model that lacks the hard ones looks better."""
    base = made(100, 1, right=0.5)
    hard = [row for row in base if row.answer != row.expected]
    easy = [row for row in base if row.answer == row.expected]
    other = [*easy, *[replace(row, answer="none") for row in hard[:10]], replace(base[0], row="new")]
    changed = replace(other[0], expected="another text")
    document = compare({"base": base, "other": [changed, *other[1:]]})
    assert document["notes"] == [
        f"other against base: {len(hard) - 10} rows of base that other lacks left out",
        "other against base: 1 row of other that base lacks left out",
        "other against base: 1 row with another expected text left out",
    ]
    got = entry(document["comparisons"], metric="exact_match", source=None)
    assert (got["difference"], got["significant"], got["rows"]) == (0.0, False, len(easy) + 10 - 1)
    values = [entry(document["rows"], model=name, metric="exact_match", source=None) for name in ("base", "other")]
    assert values[1]["value"] - values[0]["value"] > 0.2


def test_models_without_a_common_row_are_not_compared() -> None:
    other = [replace(row, row=f"other:{at}") for at, row in enumerate(made(5, 1))]
    document = compare({"base": made(5, 1), "other": other})
    assert {each["difference"] for each in document["comparisons"]} == {None}
    assert document["notes"][-1] == "other against base: they have no row in common, so nothing is compared"


def test_other_tokenizers_are_compared_by_character() -> None:
    """Control: by the token, the model of twice as many tokens looks twice as good."""
    base = made(60, 1)
    finer = [replace(row, tokens=2 * row.tokens) for row in base]
    document = compare({"base": base, "finer": finer, "same": made(60, 2)})
    assert document["metrics"] == ["loss", "perplexity", "bits_per_character", "exact_match", "f1"]
    compared = {each["metric"] for each in document["comparisons"] if each["b"] == "finer"}
    assert compared == {"bits_per_character", "exact_match", "f1"}
    assert entry(document["comparisons"], b="finer", metric="bits_per_character", source=None)["difference"] == 0.0
    assert {each["metric"] for each in document["comparisons"] if each["b"] == "same"} == {*document["metrics"]}
    assert document["notes"] == [
        "finer against base: not compared by loss per token, as their tokenizers or templates make other numbers of "
        "tokens of the same rows; compare bits_per_character"
    ]
    losses = [entry(document["rows"], model=name, metric="loss", source=None)["value"] for name in ("base", "finer")]
    assert losses[1] == pytest.approx(losses[0] / 2)


def test_losses_that_are_not_finite_and_answers_that_are_missing_are_said() -> None:
    base, other = made(40, 1), made(40, 1)
    other[3] = replace(other[3], loss=math.nan)
    other[4] = replace(other[4], answer=None)
    other[5] = replace(other[5], ended=False)
    document = compare({"base": base, "other": other})
    assert document["notes"] == [
        "other: 1 of 40 rows have no answer and are left out of metrics of answers",
        "other: 1 of 39 answers were cut at the limit of new tokens and count as they are",
        "other: loss is not finite, so it is not compared",
        "other: perplexity is not finite, so it is not compared",
    ]
    assert entry(document["rows"], model="other", metric="loss", source=None)["value"] is None
    got = entry(document["comparisons"], metric="loss", source=None)
    assert (got["difference"], got["significant"]) == (None, False)
    assert entry(document["comparisons"], metric="exact_match", source=None)["rows"] == 39
    assert entry(document["comparisons"], metric="loss", source="chat")["difference"] is None
    assert entry(document["comparisons"], metric="loss", source="math")["difference"] == 0.0


def test_a_model_without_any_answer_is_not_compared_by_answers() -> None:
    document = compare({"base": made(6, 1), "other": [replace(row, answer=None) for row in made(6, 1)]})
    assert entry(document["rows"], model="other", metric="f1", source=None)["value"] is None
    assert entry(document["comparisons"], metric="f1", source=None)["difference"] is None
    assert document["notes"] == ["other: 6 of 6 rows have no answer and are left out of metrics of answers"]


def test_one_row_has_values_and_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    document = compare({"base": made(1, 1, right=0), "tuned": made(1, 1, right=1)})
    assert {each["low"] for each in document["rows"]} == {None}
    got = entry(document["comparisons"], metric="exact_match")
    assert (got["difference"], got["p_value"], got["significant"]) == (1.0, 1.0, False)
    print_comparison(document)
    assert "tuned against base: no difference shown (+1.0000, p = 1.0000, 1 row)" in capsys.readouterr().out


def test_an_own_metric_is_compared_as_others_are(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def short(answers):\n    return [-len(a) for a in answers]\n")
    name = f"{tmp_path / 'own.py'}:short"
    tuned = [replace(row, answer=str(at)) for at, row in enumerate(made(40, 2))]
    document = compare({"base": made(40, 1), "tuned": tuned}, Settings(metrics=(name, "f1")))
    assert document["metrics"] == [name, "f1"]
    got = entry(document["comparisons"], metric=name, source=None)
    assert got["significant"]
    assert got["difference"] > 5


@pytest.mark.parametrize(
    ("rows", "metrics", "sentence"),
    [
        ([], None, "there is no row to evaluate; check the data"),
        ([replace(made(1, 1)[0], answer=None, tokens=0)], None, "no row has a trained token or an answer; evaluate"),
        ([replace(made(1, 1)[0], answer=None)], ("f1",), "metrics=f1 needs answers, and no row has any"),
        ([replace(made(1, 1)[0], tokens=0)], ("loss",), "metrics=loss needs trained tokens, and no row has any"),
        (made(1, 1), ("accuracy",), "metrics=accuracy is no metric"),
    ],
)
def test_what_cannot_be_compared_is_refused(rows: list[Row], metrics: tuple[str, ...] | None, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compare({"base": rows}, Settings(metrics=metrics))
    assert sentence in str(caught.value)


# -- what changed ------------------------------------------------------------------------------------------------------


def test_lost_answers_come_first_then_the_largest_changes() -> None:
    base = [replace(made(1, 1)[0], row=f"data:{at}", expected="a b c d".replace("a", "x"), answer="x b c d")
            for at in range(5)]  # fmt: skip
    texts = ["x b c", "nothing", "x b c d", "x  b c d", "x b c d"]
    base[2] = replace(base[2], answer="nothing")
    tuned = [replace(row, answer=text) for row, text in zip(base, texts, strict=True)]
    changed = compare({"base": base, "tuned": tuned})["changed"]
    assert [(each["row"], each["was_right"], each["is_right"]) for each in changed] == [
        ("data:1", True, False), ("data:0", True, False), ("data:3", True, False), ("data:2", False, True),
    ]  # fmt: skip
    assert changed[1]["after"] == pytest.approx(6 / 7)
    assert (changed[0]["answer_a"], changed[0]["answer_b"]) == ("x b c d", "nothing")
    limited = compare({"base": base, "tuned": tuned}, Settings(most_changed=1))["changed"]
    assert [each["row"] for each in limited] == ["data:1"]


def test_without_answers_the_losses_that_changed_most_are_listed() -> None:
    base = [replace(row, answer=None) for row in made(6, 1)]
    tuned = [replace(row, loss=row.loss + at * row.tokens) for at, row in enumerate(base)]
    tuned[5] = replace(tuned[5], loss=math.nan)
    document = compare({"base": base, "tuned": tuned})
    assert [each["row"] for each in document["changed"]] == ["data:4", "data:3", "data:2", "data:1", "data:5"]
    assert document["changed"][-1]["after"] is None
    assert document["changed"][0]["after"] - document["changed"][0]["before"] == pytest.approx(4.0)


# -- text --------------------------------------------------------------------------------------------------------------


def test_the_report_says_no_difference_and_never_equal(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison(compare({"base": made(80, 1), "tuned": made(80, 2, gain=0.2)}))
    out = capsys.readouterr().out
    assert "exact_match (higher is better)" in out
    assert "loss (lower is better)" in out
    assert "tuned against base: better (-0." in out
    assert "tuned against base: no difference shown (" in out
    assert "tuned against base on math: better" in out
    assert "each comparison is at 5% by itself" in out.lower()
    assert "equal" not in out.replace("comparisons of equal models", "")
    assert len(out.splitlines()) < 120


def test_the_report_survives_escapes_and_long_answers(capsys: pytest.CaptureFixture[str]) -> None:
    rows = made(4, 1, right=1.0)
    evil = [replace(row, answer="\x1b[2J\x1b]0;owned\x07wrong \ud83d\r\n" + "long " * 500) for row in rows]
    coloured = [replace(row, row="data:\x1b[31m1", source="\x1b[31mred") for row in evil]
    print_comparison(compare({"base\x1b[2J": [replace(row, row="data:\x1b[31m1", source="\x1b[31mred") for row in rows],
                              "tuned": coloured}))  # fmt: skip
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
    out.encode()
    assert "right before, wrong after" in out
    assert max(map(len, out.splitlines())) < 250


def test_a_comparison_that_could_not_be_made_says_so() -> None:
    nothing = {"a": "base", "b": "tuned", "source": "math", "metric": "f1", "difference": None, "low": None,
               "high": None, "p_value": None, "significant": False, "rows": 0}  # fmt: skip
    assert comparison_line(nothing) == "tuned against base on math: cannot be compared"
    worse = {**nothing, "source": None, "difference": -0.1, "low": -0.2, "high": -0.05, "p_value": 0.001,
             "significant": True, "rows": 1234}  # fmt: skip
    line = "tuned against base: worse (-0.1000 [-0.2000, -0.0500], p = 0.0010, 1234 rows)"
    assert comparison_line(worse) == line
    assert comparison_line({**worse, "metric": "loss"}).startswith("tuned against base: better")


# -- files -------------------------------------------------------------------------------------------------------------


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = [replace(row, answer=None if at else "é\u2028\n") for at, row in enumerate(made(3, 1))]
    path = tmp_path / "base.jsonl"
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    assert read_rows(path) == rows
    path.write_text(json.dumps({**asdict(rows[0]), "loss": None}) + "\n")
    assert math.isnan(read_rows(path)[0].loss)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "base.jsonl:1 is no JSON"),
        ("[]", "base.jsonl:1 does not have the keys row, source"),
        ({"more": 1}, "does not have the keys"),
        ({"tokens": 1.5}, "has tokens of the wrong type"),
        ({"tokens": True}, "has tokens of the wrong type"),
        ({"tokens": -1}, "has fewer than 0 tokens"),
        ({"loss": "1"}, "has loss of the wrong type"),
        ({"answer": 1}, "has answer of the wrong type"),
        ({"ended": 1}, "has ended of the wrong type"),
    ],
)
def test_a_damaged_file_of_rows_is_refused(line: object, sentence: str, tmp_path: Path) -> None:
    text = line if isinstance(line, str) else json.dumps({**asdict(made(1, 1)[0]), **line})  # type: ignore[dict-item]
    (tmp_path / "base.jsonl").write_text(text + "\n")
    with pytest.raises(ConfigError) as caught:
        read_rows(tmp_path / "base.jsonl")
    assert sentence in str(caught.value)


def test_a_file_that_is_absent_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rows(tmp_path / "absent.jsonl")
    (tmp_path / "base.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rows(tmp_path / "base.jsonl")
