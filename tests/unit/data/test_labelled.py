"""Rows of single answers with a label, and the prompts with other answers that are made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainers.config.mistakes import ConfigError
from trainers.config.objectives import OBJECTIVES
from trainers.config.options import TrainConfig
from trainers.config.validation import build, ignored_choices
from trainers.data.batches import TrainPlan
from trainers.data.formats import Document, RowError
from trainers.data.mismatched import Mismatched
from trainers.data.preferences import example
from trainers.data.prepare import TokenSet, load_tokenizer, prepare
from trainers.data.rollouts import prompt_of
from trainers.tools.preflight import describe_plan, make_rows, plan_training

USER, RIGHT = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
FORMATS = OBJECTIVES["kto"].formats


def read(row: dict[str, Any], **columns: str) -> tuple[Document, ...]:
    return example(row, "auto", columns, True, FORMATS)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "completion": [RIGHT], "label": False},
        {"prompt": json.dumps([USER]), "completion": json.dumps([RIGHT]), "label": "False"},  # a table's
        {"messages": [USER, RIGHT], "label": 0},
        {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}], "label": False},
    ],
)
def test_conversations_in_every_form(row: dict[str, Any]) -> None:
    (document,) = read(row)
    assert ([message["content"] for message in document.messages], document.untrained) == (["1+1?", "2"], 1)
    assert not document.desirable


def test_alpacas_columns_have_a_label_too() -> None:
    """As in LLaMA-Factory's data for KTO; beside another answer they are named."""
    row = {"instruction": "Add.", "input": "1+1", "output": "2", "history": [["Hi", "Hello"]], "kto_tag": False}
    (document,) = read(row, label="kto_tag")
    assert [message["content"] for message in document.messages] == ["Hi", "Hello", "Add.\n\n1+1", "2"]
    assert (document.untrained, document.desirable, document.unused) == (3, False, ())
    (other,) = read({"instruction": "Add.", "output": "2", "messages": [USER, RIGHT], "label": True})
    assert sorted(other.unused) == ["instruction", "output"]
    with pytest.raises(RowError, match="the label judges no answer"):
        read({"instruction": "Add.", "label": True})


def test_the_label_judges_the_last_message() -> None:
    row = {"system": "Be brief.", "messages": [USER, RIGHT, USER, RIGHT], "label": True, "id": 3}
    (document,) = read(row)
    assert (document.untrained, len(document.messages), document.unused) == (4, 5, ("id",))


@pytest.mark.parametrize("label", [True, 1, 1.0, "true", "True", " 1 "])
def test_a_label_is_true_in_every_form_that_tables_hold(label: Any) -> None:
    texts = {"prompt": "1+1?", "completion": " 2"}
    assert read({**texts, "label": label}) == (Document(prompt="1+1?", completion=" 2"),)
    assert read({**texts, "kto_tag": label}, label="kto_tag")[0].desirable
    opposite = {"true": "false", "True": "False", " 1 ": "0 "}.get(str(label), 0)
    assert not read({**texts, "label": opposite})[0].desirable


def test_a_pair_is_two_examples() -> None:
    chosen, rejected = read({"prompt": "1+1?", "chosen": " 2", "rejected": " 3", "label": True})
    assert (chosen.desirable, rejected.desirable) == (True, False)
    assert (chosen.completion, rejected.completion) == (" 2", " 3")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "completion": "b", "label": "good"}, "label is 'good', not true or false"),
        ({"prompt": "a", "completion": "b", "label": None}, "label is 'None', not true or false"),
        ({"prompt": "a", "completion": "b", "label": -1}, "label is '-1', not true or false"),
        ({"prompt": "a", "completion": "b", "label": float("nan")}, "label is 'nan', not true or false"),
        ({"prompt": "a", "completion": "b", "label": [True]}, "not true or false"),
        ({"prompt": "a", "completion": " ", "label": True}, "completion is empty"),
        ({"prompt": "a", "completion": [RIGHT], "label": True}, "one of prompt and completion is text"),
        ({"messages": [USER, RIGHT, USER], "label": True}, "ends with a message of role 'user'"),
        ({"messages": [], "label": True}, "messages is empty"),
        ({"prompt": "a", "completion": "b"}, "match no known format"),
        ({"text": "a", "label": True}, "the label judges no answer"),
        (
            {"prompt": "a", "completion": "b", "messages": [USER, RIGHT], "label": True},
            "completion and messages both hold",
        ),
        ({"completion": "b", "label": True}, "prompt is null, not text"),
    ],
)
def test_rows_without_an_answer_or_a_label_are_refused(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(RowError, match=problem):
        read(row)


def config(folder: Path, rows: list[dict[str, Any]], **options: Any) -> TrainConfig:
    path = folder / "labelled.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    needed = {"model_name_or_path": "embedded", "dataset_name": str(path), "objective": "kto", "max_length": 32}
    batch = {"global_batch_size": 4, "per_device_train_batch_size": 1, "cache_dir": str(folder / "cache")}
    return build({**needed, **batch, **options})


def numbered(count: int = 24) -> list[dict[str, Any]]:
    """Rows of which each names its number in prompt and answer; every third is undesirable."""
    return [
        {"prompt": f"Number {index}?", "completion": f" It is {index}" + " and" * (index % 7), "label": index % 3 > 0}
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, TokenSet]:
    """The config of numbered rows, and their tokens."""
    settings = config(tmp_path_factory.mktemp("numbered"), numbered())
    return settings, prepare(settings, "train")


def test_each_answer_is_taken_once_and_never_by_its_own_prompt(data: tuple[TrainConfig, TokenSet]) -> None:
    _, tokens = data
    assert tokens.desirable.tolist() == [index % 3 > 0 for index in range(24)]
    other = Mismatched(tokens)
    answers = []
    for index in range(24):
        (own_ids, own_mask), (ids, mask) = tokens.document(index), other.document(index)
        prompt = int(own_mask.argmax())
        assert ids[:prompt].tolist() == own_ids[:prompt].tolist()
        assert not mask[:prompt].any()
        assert (len(ids), mask.sum()) == (other.lengths[index], other.trained[index])
        assert len(ids) <= tokens.lengths.max()
        assert ids[prompt:].tolist() != own_ids[prompt:].tolist()
        partner_ids, partner_mask = tokens.document(int(other.partners[index]))
        answer = partner_ids[int(partner_mask.argmax()) :]
        assert ids[prompt:].tolist() == answer[: len(ids) - prompt].tolist()
        answers.append(int(other.partners[index]))
    assert sorted(answers) == list(range(24))
    assert other.fingerprint != tokens.fingerprint


def test_a_mismatched_document_ends_where_the_longest_of_the_data_does(tmp_path: Path) -> None:
    """Long prompts with long answers: what fits the data, and the model's positions, fits these."""
    rows = [{"prompt": "a " * (12 * (index % 2)), "completion": "b" + " c" * (24 - 12 * (index % 2)), "label": True}
            for index in range(12)]  # fmt: skip
    tokens = prepare(config(tmp_path, rows, max_length=64), "train")
    other = Mismatched(tokens)
    cut = other.prompts + (tokens.lengths - other.prompts)[other.partners] > other.lengths
    assert cut.any()
    assert (other.lengths <= tokens.lengths.max()).all()
    assert all(other.document(index)[1].sum() == other.trained[index] > 0 for index in range(len(tokens)))


@pytest.mark.parametrize("packing", [True, False])
def test_every_rank_measures_its_share_of_the_mismatched_documents_of_its_step(
    packing: bool, data: tuple[TrainConfig, TokenSet]
) -> None:
    """Those of the examples of the batch, each once over all ranks, in as many micro-batches on every rank."""
    settings, tokens = data[0].model_copy(update={"packing": packing}), data[1]
    for world in (1, 2, 4):
        plan: TrainPlan = plan_training(settings, tokens, world)
        for step in range(plan.total_steps):
            batches = [plan.batch(step, rank) for rank in range(world)]
            assert len({len(batch.mismatched) for batch in batches}) == 1
            scored = [part.scored for batch in batches for part in batch.mismatched]
            measured = np.concatenate([documents.numbers for documents in scored if documents is not None])
            assert sorted(measured.tolist()) == sorted(plan.rows.members_of(plan.rows_of(step)).tolist())
            assert batches[0].divisor == len(measured)
            assert all(documents is None or documents.desirable is None for documents in scored)


def test_means_over_one_label_have_divisors_of_their_own(
    data: tuple[TrainConfig, TokenSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, tokens = data
    rows = make_rows(settings, tokens)
    assert rows.scales().desirable == pytest.approx(24 / 16)
    assert rows.scales().undesirable == pytest.approx(24 / 8)
    half = settings.model_copy(update={"desirable_weight": 0.5})
    lines = describe_plan(plan_training(half, tokens, 1)).splitlines()
    assert lines[1:] == ["16 desirable and 8 undesirable examples, weighted 1 to 1"]
    monkeypatch.setattr(tokens, "desirable", np.ones(24, dtype=bool))
    assert np.isnan(make_rows(settings, tokens).scales().undesirable)


def test_without_the_divergence_nothing_is_mismatched(data: tuple[TrainConfig, TokenSet]) -> None:
    settings, tokens = data[0].model_copy(update={"loss_type": "apo_zero_unpaired"}), data[1]
    assert make_rows(settings, tokens).mismatched is None
    assert "kl" not in settings.objective_spec.metrics
    assert plan_training(settings, tokens, 1).batch(0, 0).mismatched == []


def test_mistakes_have_file_and_line(tmp_path: Path) -> None:
    rows = [*numbered(3), {"prompt": "a", "completion": "b", "label": "maybe"}]
    with pytest.raises(ConfigError, match=r"labelled.jsonl:4.*'maybe', not true or false"):
        prepare(config(tmp_path, rows), "train")
    alone = config(tmp_path, numbered(1))
    with pytest.raises(ConfigError, match="this is the only one"):
        make_rows(alone, prepare(alone, "train"))
    unlabelled = config(tmp_path, [{"prompt": "a", "completion": "b"}])
    with pytest.raises(ConfigError, match=r"preference: chosen, rejected; labelled: label"):
        prepare(unlabelled, "train")
    labelled = config(tmp_path, numbered(), objective="dpo")
    with pytest.raises(ConfigError, match=r"format labelled.*set objective=kto"):
        prepare(labelled, "train")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"overlong": "split"}, "half an answer cannot be preferred"),
        ({"overlong": "split", "loss_type": "apo_zero_unpaired"}, "half an answer cannot be preferred"),
        ({"loss_type": "sigmoid"}, "use kto, apo_zero_unpaired"),
        ({"desirable_weight": 0, "undesirable_weight": 0}, "nothing would be learned"),
        ({"desirable_weight": -1}, "desirable_weight"),
        ({"assistant_only_loss": False}, "compares the answers alone"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(tmp_path, [], **options)


def test_options_of_other_objectives_are_named(tmp_path: Path) -> None:
    ignored = ignored_choices(config(tmp_path, [], simpo_gamma=0.5))
    assert [mistake.option for mistake in ignored] == ["simpo_gamma"]
    other = ignored_choices(config(tmp_path, [], objective="dpo", undesirable_weight=2))
    assert [mistake.option for mistake in other] == ["undesirable_weight"]


def test_an_undesirable_answer_is_not_the_expected_one(data: tuple[TrainConfig, TokenSet]) -> None:
    chosen, documents = data
    decode, prompts = load_tokenizer(chosen).decode, [prompt_of(documents, index) for index in range(len(documents))]
    assert {prompt.expected(decode) == "" for prompt in prompts if not prompt.desirable} == {True}
    assert {"It is" in prompt.expected(decode) for prompt in prompts if prompt.desirable} == {True}, "control"
    assert [prompt.desirable for prompt in prompts] == documents.desirable.tolist()
