"""Converts values from a form or a script to command-line texts, and lists the options that a form always shows."""

from __future__ import annotations

from typing import Any

from trainers.config.fields import text_of
from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.objectives import OWN_OPTIONS
from trainers.config.options import TrainConfig

COMMON = (
    "learning_rate", "num_train_epochs", "max_steps", "global_batch_size", "per_device_train_batch_size", "max_length",
    "mixed_precision", "save_steps", "run_name", "packing", "gradient_checkpointing", "method", "lora_r", "lora_alpha",
    "model_name_or_path", "dataset_name", "mix", "eval_dataset_name", "eval_share", "objective",
    *OWN_OPTIONS,
)  # fmt: skip
MAX_TEXT_BYTES = 4096


def as_texts(values: dict[str, Any]) -> dict[str, str]:
    """Converts the values of a form or a script to text.

    Raises:
        ConfigError: for a value that is not text, number, boolean, or a list or mapping of these, and for text that
            is too long or cannot be encoded.
    """
    texts, mistakes = {}, []
    for name, value in values.items():
        problem = _problem(value)
        if not isinstance(name, str) or len(name) > 100 or not name.isprintable():
            mistakes.append(
                Mistake("", None, "an option has an invalid name", "`tunesmith train --help` lists all options")
            )
        elif problem:
            mistakes.append(Mistake(name, None, problem))
        else:
            texts[name] = text_of(value)
    if mistakes:
        raise ConfigError(mistakes)
    return texts


def _problem(value: Any) -> str | None:
    """Why a value cannot be converted; None if it can."""
    entries = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    if not all(entry is None or isinstance(entry, str | bool | int | float) for entry in entries):
        return f"is a {type(value).__name__} with values that are not text; write it as on the command line"
    if value is not None and isinstance(value, list | dict) and any("," in str(entry) for entry in entries):
        return "has an entry with a comma, which only a YAML file can express; use `tunesmith train --config FILE`"
    if isinstance(value, dict) and any("=" in str(key) for key in value):
        return "has a name with =, which only a YAML file can express; use `tunesmith train --config FILE`"
    try:
        size = len(text_of(value).encode())
    except UnicodeEncodeError:
        return "has text that is not valid Unicode; enter it again"
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "has a number with too many digits; use a smaller one"
    return f"is too long ({size} bytes, at most {MAX_TEXT_BYTES}); shorten it" if size > MAX_TEXT_BYTES else None


def names() -> frozenset[str]:
    """Names of all options, including `preset`."""
    return frozenset(TrainConfig.model_fields)
