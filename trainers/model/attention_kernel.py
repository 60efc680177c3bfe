"""Chooses the attention kernel at the start of a run and checks it against plain matrix products on the device."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import nn

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data.layout import AttentionMetadata, DocumentLayout
from trainers.model import attention
from trainers.strategy.traffic import by_layer

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Maximum relative error (2-norm) of an output or gradient, by compute dtype."""
_LENGTHS = (5, 17, 12, 30)
"""Lengths of the documents in the trial."""


def choose(config: TrainConfig, model_config: Any, device: torch.device, compute: torch.dtype) -> str:
    """Chooses the kernel for a model on a device.

    Args:
        config: the run's config.
        model_config: the transformers config of the language model.
        device: the device of this rank.
        compute: dtype of matrix products.

    Returns:
        Its name in `attention.KERNELS`.

    Raises:
        ConfigError: if the requested kernel does not work for this model or device.
    """
    requested = config.attn_implementation
    if (
        getattr(model_config, "num_attention_heads", None) is None
    ):  # no attention heads to try it with; the probe checks the model
        if requested in ("auto", "sdpa", "eager"):
            return "sdpa" if requested == "auto" else requested
        raise ConfigError.about(
            "attn_implementation", requested, f": {model_config.model_type} models have no attention heads", "use auto"
        )
    if requested != "auto":
        problem = _unfit(requested, model_config, device, compute) or trial(requested, model_config, device, compute)
        if problem:
            raise ConfigError.about("attn_implementation", requested, f": {problem}", "use auto")
        return requested
    if _softcap(model_config):
        return "eager"
    # sdpa suits compiled blocks, which need one shape for all micro-batches, and unpacked rows, which need no mask.
    best = "sdpa" if config.torch_compile or not config.packing else "varlen" if device.type == "cuda" else "documents"
    if _unfit(best, model_config, device, compute):
        return "sdpa"
    if problem := trial(best, model_config, device, compute):
        print(f"warning: the attention kernel {best} is not used: {problem}; sdpa is used instead", flush=True)
        return "sdpa"
    return best


def _softcap(model_config: Any) -> bool:
    return getattr(model_config, "attn_logit_softcapping", None) is not None


def _sizes(model_config: Any) -> tuple[int, int, int]:
    """Number of query heads and of key heads, and head size; of the layer with the largest heads, if they differ."""
    heads = int(model_config.num_attention_heads)
    keys, sizes = (by_layer(model_config, name) for name in ("num_key_value_heads", "head_dim"))
    layers = zip(sizes, keys, strict=True)
    size, count = max((int(size or model_config.hidden_size // heads), int(few or heads)) for size, few in layers)
    return heads, count, size


def _unfit(kernel: str, model_config: Any, device: torch.device, compute: torch.dtype) -> str | None:
    """Why a kernel does not support this model or device; None if it does."""
    if _softcap(model_config) and kernel not in ("eager", "flex"):
        return "this model caps its attention scores, which only eager and flex can do"
    if kernel not in ("varlen", "flex"):
        return None
    if device.type != "cuda":
        return "it needs an NVIDIA GPU"
    if kernel == "flex":
        return None
    if find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} does not have it"
    if torch.cuda.get_device_capability(device) < (8, 0) or compute not in (torch.float16, torch.bfloat16):
        return "it needs a GPU of compute capability 8.0 and mixed_precision=bf16 or fp16"
    if getattr(model_config, "v_head_dim", None):
        return "it needs values of the same size as queries"
    size = _sizes(model_config)[2]
    return None if size % 8 == 0 and size <= 256 else f"it does not support heads of size {size}"


def trial(kernel: str, model_config: Any, device: torch.device, compute: torch.dtype) -> str | None:
    """Runs a kernel on the device and compares output and gradients with those of `eager` in fp32.

    The inputs are two rows of several documents with random values and the model's numbers of heads.

    Args:
        kernel: name of the kernel in `attention.KERNELS`.
        model_config: the transformers config of the language model.
        device: the device to run on.
        compute: dtype of the inputs to the kernel.

    Returns:
        The problem; None if the results agree.
    """
    heads, keys, size = _sizes(model_config)
    generator = torch.Generator().manual_seed(0)
    length = sum(_LENGTHS)
    tensors = [torch.randn(2, count, length, size, generator=generator) for count in (heads, keys, keys)]
    borders = np.cumsum([0, *_LENGTHS, *_LENGTHS[::-1]])
    metadata = AttentionMetadata(DocumentLayout.of(borders, 2).to(device))
    tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False  # for the reference
    try:
        expected = _outcome("eager", tensors, metadata, device, torch.float32)
        outcome = _outcome(kernel, tensors, metadata, device, compute)
    except (RuntimeError, ValueError, TypeError, ImportError) as error:  # unsupported device or torch
        return f"it fails on this device: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    errors = [float((ours - other).norm() / other.norm()) for ours, other in zip(outcome, expected, strict=True)]
    if max(errors) <= _TOLERANCE[compute]:
        return None
    return f"its results are off by {max(errors):.1e} on this device, where {_TOLERANCE[compute]:.0e} is allowed"


def _outcome(
    kernel: str, tensors: list[torch.Tensor], metadata: AttentionMetadata, device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Output of a kernel and gradients of query, key and value, as fp32 on the CPU."""
    module: Any = nn.Module()
    query, key, value = (tensor.to(device, dtype).requires_grad_() for tensor in tensors)
    module.num_key_value_groups = query.shape[1] // key.shape[1]
    output, _ = getattr(attention, kernel)(module, query, key, value, None, metadata)
    gradients = torch.autograd.grad(output.float().square().sum(), (query, key, value))
    return [tensor.detach().float().cpu() for tensor in (output, *gradients)]
