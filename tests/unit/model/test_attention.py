"""Each attention kernel equals plain matrix products, and the one that a run uses is chosen by what it can do."""

from __future__ import annotations

from itertools import chain, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from tests.rounding import bound, relative, reordered
from trainers.config.mistakes import ConfigError
from trainers.config.validation import build, ignored_choices
from trainers.data.layout import AttentionMetadata, DocumentLayout
from trainers.model import attention, attention_kernel
from trainers.model.attention_kernel import choose

CPU = torch.device("cpu")
LENGTHS = [[3, 9, 1, 7], [1, 1, 2, 16], [20], [5, 5, 5, 5]]
"""Tokens of each document of four rows of 20; some have a single one, and one fills its row."""
SHAPE = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=8, hidden_size=32)
"""What a choice reads of a model's config."""


def layout(lengths: list[list[int]] = LENGTHS) -> DocumentLayout:
    return DocumentLayout.of(np.cumsum([0, *chain(*lengths)]), len(lengths))


def packed_documents(lengths: list[list[int]] = LENGTHS) -> AttentionMetadata:
    return AttentionMetadata(layout(lengths))


SINKS = [-1.0, 0.0, 2.0, 0.5]
"""Attention sinks of four heads."""


def outcome(
    kernel: str, metadata: AttentionMetadata, gradients: bool = True, s_aux: list[float] | None = None, **options: Any
) -> list[torch.Tensor]:
    """Output, and gradients of query, key, value and attention sinks, of a kernel."""
    made = torch.Generator().manual_seed(1)
    tensors = [torch.randn(4, heads, 20, 8, generator=made) for heads in (4, 2, 2)]
    module: Any = nn.Module()
    module.num_key_value_groups = 2
    if s_aux is not None:
        tensors.append(torch.tensor(s_aux))
        options["s_aux"] = tensors[3]
    for one in tensors:
        one.requires_grad_(gradients)
    output, _ = getattr(attention, kernel)(module, *tensors[:3], None, metadata, **options)
    assert output.shape == (4, 20, 4, 8)
    return [output.detach(), *(torch.autograd.grad(output.square().sum(), tensors) if gradients else ())]


def assert_like_eager(found: list[torch.Tensor], metadata: AttentionMetadata, **options: Any) -> None:
    """No further from plain matrix products than those are from themselves in another order of sums."""
    gradients = len(found) > 1
    expected = outcome("eager", metadata, gradients, **options)
    with reordered("backwards"):
        others = outcome("eager", metadata, gradients, **options)
    for mine, plain, other in zip(found, expected, others, strict=True):
        assert relative(mine, plain) <= bound(relative(other, plain))


def reference_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, key_starts: torch.Tensor,
    longest: int, longest_key: int, *, scale: float | None, window_size: tuple[int, int], enable_gqa: bool,
) -> torch.Tensor:  # fmt: skip
    """What `torch.nn.attention.varlen.varlen_attn` documents, which runs on GPUs alone; `[tokens, heads, size]`."""
    assert starts.dtype == torch.int32
    assert torch.equal(starts, key_starts)
    assert int(starts.diff().max()) == longest == longest_key
    assert window_size[1] == 0
    parts = []
    for start, end in pairwise(starts.tolist()):
        place = torch.arange(end - start)
        far = place[:, None] - place[None, :]
        seen = (far >= 0) & ((far <= window_size[0]) | (window_size[0] < 0))
        three = (one[start:end].transpose(0, 1) for one in (query, key, value))
        found = functional.scaled_dot_product_attention(*three, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        parts.append(found.transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def varlen_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", reference_varlen)


@pytest.mark.parametrize("kernel", ["sdpa", "documents", "varlen"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"sliding_window": 4}, {"sliding_window": 50}, {"scaling": 0.3}, {"s_aux": SINKS},
        {"s_aux": SINKS, "sliding_window": 4, "scaling": 0.3},
    ],
)  # fmt: skip
@pytest.mark.usefixtures("varlen_of_a_gpu")
def test_a_kernel_equals_plain_matrix_products(kernel: str, packed: bool, options: dict[str, Any]) -> None:
    metadata = packed_documents() if packed else AttentionMetadata()
    assert_like_eager(outcome(kernel, metadata, **options), metadata, **options)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"sliding_window": 4}, {"softcap": 2.0}, {"softcap": 2.0, "scaling": 0.3},
        {"s_aux": SINKS, "sliding_window": 4},
    ],
)  # fmt: skip
def test_flex_equals_plain_matrix_products(packed: bool, options: dict[str, Any]) -> None:
    """Forward alone: torch has no flex gradients on a CPU."""
    metadata = packed_documents() if packed else AttentionMetadata()
    assert_like_eager(outcome("flex", metadata, False, **options), metadata, **options)


def test_attention_sinks_are_those_of_transformers() -> None:
    """Its function for GPT-OSS, one document at a time."""
    metadata, made = packed_documents([[20], [20], [20], [20]]), torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(4, heads, 20, 8, generator=made) for heads in (4, 2, 2))
    module: Any = nn.Module()
    module.num_key_value_groups, module.sinks = 2, torch.tensor(SINKS)
    mask = torch.full((20, 20), float("-inf")).triu(1)[None, None]
    expected, _ = eager_attention_forward(module, query, key, value, mask, scaling=8**-0.5)
    ours = outcome("eager", metadata, gradients=False, s_aux=SINKS)[0]
    torch.testing.assert_close(ours, expected)
    assert not torch.allclose(ours, outcome("eager", metadata, gradients=False)[0], atol=0.1), "without them it differs"


def test_another_border_would_be_seen() -> None:
    """Control: one token in the document of its neighbours moves the output."""
    plain = outcome("eager", packed_documents())[0]
    others = packed_documents([[3, 9, 1, 7], [1, 1, 2, 16], [20], [5, 5, 6, 4]])
    for kernel in ("sdpa", "documents", "eager"):
        moved = (outcome(kernel, others)[0] - plain).abs().amax((2, 3))
        assert moved[3, 15:].max() > 1e-2
        assert moved[:3].max() < 1e-4


def test_the_layout_names_every_token_once() -> None:
    one = layout()
    assert one.borders.tolist() == [0, 3, 12, 13, 20, 21, 22, 24, 40, 60, 65, 70, 75, 80]
    assert one.longest == 20
    slots, buckets = one.side_by_side
    room = sum(count * width for count, width in buckets)
    assert len(set(slots.tolist())) == 80
    assert int(slots.max()) < room < 2 * 80
    assert sum(count for count, _ in buckets) == 13
    for border, length in zip(one.borders[:-1], one.borders.diff(), strict=True):
        start = int(slots[border])
        assert slots[border : border + length].tolist() == list(range(start, start + int(length)))
    assert one.side_by_side[0] is slots, "made once"


def asked(**changes: Any) -> Any:
    return build({"model_name_or_path": "embedded", "dataset_name": "embedded", **changes})


@pytest.mark.parametrize(
    ("changes", "shape", "kernel"),
    [
        ({}, {}, "documents"),
        ({"packing": False}, {}, "sdpa"),
        ({"torch_compile": True}, {}, "sdpa"),
        ({}, {"attn_logit_softcapping": 50.0}, "eager"),
        ({"attn_implementation": "sdpa"}, {}, "sdpa"),
        ({"attn_implementation": "eager"}, {"attn_logit_softcapping": 50.0}, "eager"),
    ],
)
def test_the_choice_on_a_cpu(changes: dict[str, Any], shape: dict[str, Any], kernel: str) -> None:
    assert choose(asked(**changes), SimpleNamespace(**{**vars(SHAPE), **shape}), CPU, torch.float32) == kernel


@pytest.mark.parametrize(
    ("changes", "shape", "reason"),
    [
        ({"attn_implementation": "varlen", "mixed_precision": "bf16"}, {}, "it needs an NVIDIA GPU; use auto"),
        ({"attn_implementation": "flex"}, {}, "it needs an NVIDIA GPU"),
        ({"attn_implementation": "documents"}, {"attn_logit_softcapping": 50.0}, "caps its attention scores"),
        ({"attn_implementation": "sdpa"}, {"attn_logit_softcapping": 50.0}, "only eager and flex can do"),
    ],
)
def test_a_kernel_that_cannot_do_the_work_is_refused(
    changes: dict[str, Any], shape: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"attn_implementation={changes['attn_implementation']}: .*{reason}"):
        choose(asked(**changes), SimpleNamespace(**{**vars(SHAPE), **shape}), CPU, torch.float32)


def test_half_precision_passes_the_trial() -> None:
    assert choose(asked(mixed_precision="bf16"), SHAPE, CPU, torch.bfloat16) == "documents"


def leaking(*inputs: Any, **rest: Any) -> Any:
    """A kernel that looks across the borders of documents."""
    *inputs_but_documents, _ = inputs
    return attention.sdpa(*inputs_but_documents, AttentionMetadata(), **rest)


def test_a_kernel_with_wrong_results_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control of the trial: it sees a leak, tells of it, and refuses the kernel to those who ask for it."""
    monkeypatch.setattr(attention, "documents", leaking)
    assert choose(asked(), SHAPE, CPU, torch.float32) == "sdpa"
    told = capsys.readouterr().out
    assert "the attention kernel documents is not used: its results are off by" in told
    assert "sdpa is used instead" in told
    with pytest.raises(ConfigError, match="attn_implementation=documents: its results are off"):
        choose(asked(attn_implementation="documents"), SHAPE, CPU, torch.float32)


def test_the_measure_of_a_trial_is_never_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rounding is coarser than what a kernel in fp32 may be off by."""
    seen, whole = [], attention_kernel._outcome

    def looking(*inputs: Any) -> Any:
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        return whole(*inputs)

    monkeypatch.setattr(attention_kernel, "_outcome", looking)
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    try:
        assert choose(asked(tf32=True), SHAPE, CPU, torch.float32) == "documents"
        assert seen == [False, False]
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_a_kernel_that_fails_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*inputs: Any, **rest: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(attention, "documents", failing)
    assert choose(asked(), SHAPE, CPU, torch.float32) == "sdpa"
    assert "it fails on this device: no kernel image is available" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"attn_implementation": "varlen"}, "attn_implementation=varlen needs half precision, not mixed_precision=no"),
        (
            {"attn_implementation": "documents", "torch_compile": True},
            "attn_implementation=documents has new shapes at each step",
        ),
    ],
)
def test_clashes_are_told_before_the_launch(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        asked(**changes)


@pytest.mark.parametrize("kernel", ["documents", "varlen"])
def test_a_kernel_for_packed_rows_is_told_to_be_idle_without_them(kernel: str) -> None:
    chosen = {"attn_implementation": kernel, "mixed_precision": "bf16"}
    (mistake,) = [mistake for mistake in ignored_choices(asked(packing=False, **chosen)) if "attn" in mistake.option]
    assert str(mistake).startswith(f"attn_implementation={kernel} is ignored: packing=false")
    assert ignored_choices(asked(**chosen)) == []


def test_a_gpu_of_today_gets_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules for a GPU; the trial that would run on it is stood in for."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(attention_kernel, "trial", lambda *inputs: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose(asked(mixed_precision="bf16"), SHAPE, gpu, torch.bfloat16) == "varlen"
    assert choose(asked(), SHAPE, gpu, torch.float32) == "sdpa"
    odd = SimpleNamespace(**{**vars(SHAPE), "head_dim": 20})
    assert choose(asked(mixed_precision="bf16"), odd, gpu, torch.bfloat16) == "sdpa"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose(asked(mixed_precision="fp16"), SHAPE, gpu, torch.float16) == "sdpa"


def graphs_of_varlen() -> int:
    """How often it is compiled for five micro-batches of one shape, each with another longest document."""
    tensors = [torch.empty(1, heads, 512, 64, device="meta", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(
        lambda metadata, *three: attention.varlen(nn.Module(), *three, None, metadata)[0], backend="aot_eager"
    )
    for longest in (260, 270, 300, 350, 400):
        compiled(AttentionMetadata(layout([[longest, 512 - longest]]).to(torch.device("meta"))), *tensors)
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_compiled_varlen_is_made_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    assert graphs_of_varlen() == 1
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    assert graphs_of_varlen() > 1, "control: the longest document is a part of the graph"
