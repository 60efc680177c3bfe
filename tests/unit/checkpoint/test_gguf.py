"""What the converter of GGUF files is told. The files themselves are read in tests/integrations/test_gguf.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainers.checkpoint import gguf
from trainers.checkpoint.export_check import Probe
from trainers.checkpoint.gguf import check_gguf
from trainers.config.gguf_types import GgufRequest
from trainers.config.mistakes import ConfigError
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.data.tokenizer import load_tokenizer
from trainers.model.load import element_counts, weight_files

TURNS = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}<|turn|>"


def tokenizer(template: str | None, prepend: str = "first") -> PreTrainedTokenizerFast:
    """As converted from SentencePiece: `first` puts a space before a first text, `always` also after special tokens."""
    unknown, bos, *others = "<unk>", "<s>", "<|turn|>", "▁", "a", "▁a", "H", "i"
    vocabulary = {piece: number for number, piece in enumerate([unknown, bos, *others])}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    result = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=others[0])
    result.chat_template = template
    return result


@pytest.mark.parametrize(
    ("template", "prepend", "first_id", "expected"),
    [
        (TURNS, "first", 2, {"add_bos_token": False, "add_prefix_space": False}),
        (TURNS, "always", 2, {"add_bos_token": False}),
        ("{{ bos_token }}" + TURNS, "first", 2, {"add_bos_token": True, "add_prefix_space": False}),
        (TURNS, "first", 1, {"add_bos_token": True, "add_prefix_space": False}),
        ("a: " + TURNS, "first", 5, {"add_bos_token": False}),
        ("{{ raise_exception('no') }}", "first", 2, {}),
        ("", "first", 2, {}),
        (None, "first", 2, {}),
    ],
)
def test_the_converter_is_told_how_conversations_begin(
    template: str | None, prepend: str, first_id: int, expected: dict[str, bool]
) -> None:
    its_tokenizer = tokenizer(template, prepend)
    probes = [Probe(torch.tensor([[first_id, 4, 4]]), torch.tensor([1]))]
    assert gguf._beginning(its_tokenizer, gguf._encoder(its_tokenizer), probes) == expected


@pytest.mark.parametrize(("dtype", "fits"), [(torch.bfloat16, True), (torch.float32, False)])
def test_files_need_room_by_the_dtype_of_the_export(
    dtype: torch.dtype, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(model_name_or_path=EMBEDDED, dataset_name=EMBEDDED, method="full")
    weights = sum(element_counts(weight_files(config)).values())
    monkeypatch.setattr(gguf, "free_bytes", lambda folder: int(weights * (2 + 2 + 1.1)))
    monkeypatch.setattr(gguf, "_convert", lambda *arguments: None)  # llama.cpp is not here
    request = GgufRequest(("q8_0",), tmp_path)
    if fits:
        check_gguf(request, config, load_tokenizer(config), dtype, tmp_path)
        return
    with pytest.raises(ConfigError, match="q8_0: the export and these files need up to"):
        check_gguf(request, config, load_tokenizer(config), dtype, tmp_path)
