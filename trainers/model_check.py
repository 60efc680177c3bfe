"""What can be known of a model before its weights are read: from its config, a small copy, and its files' headers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from trainers.config import ConfigError, TrainConfig
from trainers.data.prepare import load_tokenizer
from trainers.headers import Headers
from trainers.model_probe import in_one_line
from trainers.models import add_adapters, check_attention, fit_lines, load_shape, own_code

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
           "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
           "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}  # fmt: skip


def inspect_model(config: TrainConfig, headers: Headers | None) -> dict[str, Any]:
    """What is worth knowing about a model that can be trained; nothing is read of it but config and tokenizer.

    Args:
        headers: of all its weight files; None where they are not at hand, or not needed.

    Returns:
        `lines` for the user, `vocab_size` and `pad_token_id`.

    Raises:
        ConfigError: when the config describes no causal language model that can be built and trained here, or the
            weights in the files are not those that it needs.
    """
    model_config = load_shape(config)
    tokenizer = load_tokenizer(config)
    found = {"vocab_size": model_config.get_text_config().vocab_size, "pad_token_id": tokenizer.pad_token_id}
    if own_code(config, model_config):
        return {"lines": [], **found}
    empty = check_empty(config, model_config)
    if config.method != "full" and config.lora_target_modules != ["all-linear"]:  # what fits no name shows on it
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            add_adapters(empty, config)
    check_attention(config, model_config)
    if headers is None or getattr(model_config, "quantization_config", None) is not None:
        return {"lines": [], **found}
    return {"lines": fit_lines(config, _loading_report(model_config, headers)), **found}


def check_empty(config: TrainConfig, model_config: Any) -> Any:
    """The model without memory for its weights.

    Raises:
        ConfigError: when its sizes do not go together.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(model_config)
    except ImportError as error:
        raise ConfigError(
            f"model_name_or_path={config.model_name_or_path} needs a package that is missing: {in_one_line(error)}"
        ) from None
    except Exception as error:  # families raise what they like
        raise ConfigError(
            f"model_name_or_path={config.model_name_or_path}: its config.json describes no model that can be built "
            f"({in_one_line(error)}); correct it, or download the model again"
        ) from None


def _loading_report(model_config: Any, headers: Headers) -> dict[str, Any]:
    """What transformers would say after loading: it loads tensors without memory, of the names and shapes in the files.

    So all that it renames, fuses and splits while it loads is taken into account.
    """
    tensors = {
        name: torch.empty(shape, dtype=_DTYPES.get(dtype, torch.float32), device="meta")
        for name, (dtype, shape) in headers.items()
    }
    family: Any = AutoModelForCausalLM._model_mapping[type(model_config)]
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        _, report = family.from_pretrained(
            None, config=model_config, state_dict=tensors, device_map={"": "meta"}, ignore_mismatched_sizes=True,
            output_loading_info=True,
        )  # fmt: skip
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
    return report
