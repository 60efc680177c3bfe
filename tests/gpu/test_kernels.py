"""Each attention kernel equals plain matrix products on the GPU, forward and back, and a run gets varlen."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainers.config.validation import build
from trainers.data.layout import AttentionMetadata, DocumentLayout
from trainers.model import attention
from trainers.model.attention import avoid_cudnn
from trainers.model.attention_kernel import choose, trial

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
        return whole(*inputs[:-1], AttentionMetadata(), **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "varlen", leaking)
    assert "its results are off" in str(trial("varlen", SHAPES[0], GPU, torch.bfloat16))


def test_no_gradient_is_nan_under_a_mask() -> None:
    """Rows whose length is 64 beyond a multiple of 128, scores far below zero: cuDNN's gradients were NaN."""
    length, size = 704, 64
    made = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, length, size, generator=made) * scale for scale in (0.1, 0.1, 1.0))
    query[..., 0], key[..., 0] = 1.0, -120 * size**0.5
    inputs = [one.to(GPU, torch.bfloat16).requires_grad_() for one in (query, key, value)]
    avoid_cudnn()
    metadata = AttentionMetadata(DocumentLayout.of(np.array([0, 300, length]), 1).to(GPU))
    output, _ = attention.sdpa(torch.nn.Module(), *inputs, None, metadata)
    gradients = torch.autograd.grad(output.float().square().sum(), inputs)
    assert all(bool(one.isfinite().all()) for one in gradients)


def test_compiled_varlen_is_not_made_anew_for_each_length() -> None:
    made = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 512, 64, generator=made).to(GPU, torch.bfloat16) for heads in (4, 2, 2))
    compiled = torch.compile(lambda metadata, *three: attention.varlen(torch.nn.Module(), *three, None, metadata)[0])
    torch._dynamo.utils.counters.clear()
    for longest in (200, 256, 300, 350, 400):
        metadata = AttentionMetadata(DocumentLayout.of(np.array([0, longest, 512]), 1).to(GPU))
        found = compiled(metadata, query, key, value)
        expected = attention.varlen(torch.nn.Module(), query, key, value, None, metadata)[0]
        torch.testing.assert_close(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_half_precision_on_packed_rows_gets_varlen() -> None:
    config = build({"model_name_or_path": "embedded", "dataset_name": "embedded", "mixed_precision": "bf16"})
    assert choose(config, SHAPES[0], GPU, torch.bfloat16) == "varlen"
