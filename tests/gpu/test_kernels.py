"""Each attention kernel equals plain matrix products on the GPU, forward and back, and a run gets varlen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trainers import attention
from trainers.attention import use_documents
from trainers.config import build
from trainers.kernel_choice import choose, trial

GPU = torch.device("cuda", 0)
SHAPES = [
    SimpleNamespace(num_attention_heads=heads, num_key_value_heads=keys, head_dim=size, hidden_size=heads * size)
    for heads, keys, size in ((16, 8, 128), (32, 8, 64), (9, 3, 64), (4, 1, 256))
]


@pytest.mark.parametrize("kernel", ["varlen", "flex", "documents", "sdpa"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_kernel_equals_plain_matrix_products(kernel: str, shape: SimpleNamespace) -> None:
    assert trial(kernel, shape, GPU, torch.bfloat16) is None


def test_a_leak_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a kernel that does not know the documents."""
    whole = attention.sdpa

    def leaking(*inputs: object, **rest: object) -> object:
        use_documents(None)
        return whole(*inputs, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "varlen", leaking)
    assert "its results are off" in str(trial("varlen", SHAPES[0], GPU, torch.bfloat16))


def test_half_precision_on_packed_rows_gets_varlen() -> None:
    config = build({"model_name_or_path": "embedded", "dataset_name": "embedded", "mixed_precision": "bf16"})
    assert choose(config, SHAPES[0], GPU, torch.bfloat16) == "varlen"
