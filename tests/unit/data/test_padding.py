"""No document ends with the token to pad with: a stock classifier scores the last token before the padding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.data.padding import check_last_tokens, padding_token
from trainers.data.prepare import load_tokenizer, prepare


def config(**changes: object) -> TrainConfig:
    needed = {"model_name_or_path": "embedded", "dataset_name": "embedded", "objective": "reward"}
    return build({**needed, "max_length": 64, **changes})


def test_the_tokenizers_own_padding_is_taken_unless_documents_end_with_it() -> None:
    tokenizer = load_tokenizer(config())
    assert padding_token(tokenizer) == tokenizer.pad_token_id
    own, tokenizer.pad_token = tokenizer.pad_token_id, tokenizer.eos_token
    assert padding_token(tokenizer) == own  # by its name


def test_a_tokenizer_without_such_a_token_is_refused() -> None:
    tokenizer = load_tokenizer(config())
    tokenizer.eos_token = tokenizer.pad_token  # the one special token that could serve
    with pytest.raises(ConfigError, match="at which documents end, and a reward model must tell both apart"):
        padding_token(tokenizer)


def test_documents_that_end_with_padding_are_refused_with_file_and_line(tmp_path: Path) -> None:
    path, padding = tmp_path / "pairs.jsonl", load_tokenizer(config()).pad_token
    rows = [{"prompt": "a", "chosen": " b", "rejected": " c"}, {"prompt": "a", "chosen": " c", "rejected": " b"}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = config(dataset_name=str(path), cache_dir=str(tmp_path / "cache"))
    data = prepare(settings, "train")
    check_last_tokens(settings, [data, None])
    data._input_ids = data._input_ids.copy()
    data._input_ids[data._starts[3] - 1] = load_tokenizer(config()).pad_token_id
    with pytest.raises(ConfigError, match=rf"pairs.jsonl:2: a document ends with '{padding}'"):
        check_last_tokens(settings, [data])
    check_last_tokens(config(objective="dpo"), [data])  # which pads rows by a mask
