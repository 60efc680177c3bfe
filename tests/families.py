"""Small models of every causal family of transformers, and what check and run say of them, each by itself.

The check is that of `tunesmith train --check`. The run is the real one up to its first optimizer step: model, strategy,
probe, forward and backward pass, update.
"""

from __future__ import annotations

import math
import re
import shutil
import time
import traceback
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.steps import Steps
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.embedded import BASE_DIR
from trainers.model.small_model import small_config
from trainers.strategy.strategy import load_strategy
from trainers.tools.preflight import check

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
IMAGE_FAMILIES = sorted(set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - set(FAMILIES))
"""Models of images and text that transformers does not list as causal language models too."""
_VOCABULARY, _POSITIONS, _LARGEST = 1030, 1024, 16_000_000
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")
_INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
            "indexer_compress_ratio": 4}  # fmt: skip
REQUIRED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0}
                                                for kind in ("full_attention", "sliding_attention")}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_shared_experts": 2, "n_routed_experts": 128, "num_experts_per_tok": 6},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "paddleocr_vl": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0,
                                                         "mrope_section": [16, 24, 24]}}},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "step3p7": {"text_config": {"sliding_window": 512}},
}  # fmt: skip
"""What the default configs of these families lack, and published ones have."""
_OK = "ok"
_ADVICE = re.compile(r"\buse ([^;]*)$")


def save_small(folder: Path, family: str = "llama", auto: Any = None, **changes: Any) -> Path:
    """A small random model of a family with the embedded tokenizer, saved.

    Args:
        folder: where.
        family: its `model_type`.
        auto: the class of transformers that builds it; by default that of its family.
        changes: of its config.

    Raises:
        Exception: of any kind, where the family's sizes are bound to each other in another way.
    """
    auto = auto or (AutoModelForImageTextToText if family in IMAGE_FAMILIES else AutoModelForCausalLM)
    folder.mkdir(exist_ok=True, parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (BASE_DIR / name).exists():
            shutil.copy(BASE_DIR / name, folder)
    model_config = small_config(AutoConfig.for_model(family, **REQUIRED.get(family, {})))
    text = model_config.get_text_config()
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        if hasattr(text, name):
            setattr(text, name, _VOCABULARY)
    for name in _LENGTHS:
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, _POSITIONS)
    if getattr(text, "pad_token_id", None) == 0:  # here it ends documents
        text.pad_token_id = _VOCABULARY - 1
    for name, value in changes.items():
        setattr(model_config, name, value)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in auto.from_config(model_config).parameters())
    if size > _LARGEST:
        raise ValueError(f"its small copy has {size} weights")
    torch.manual_seed(0)
    auto.from_config(model_config, dtype=torch.float32).save_pretrained(folder)
    return folder


def config_for(folder: Path, **changes: Any) -> TrainConfig:
    """A few rows of the embedded data for a model."""
    return build({"model_name_or_path": str(folder), "dataset_name": "embedded", "eval_dataset_name": "none",
                  "method": "full", "max_train_samples": 20, "global_batch_size": 2,
                  "per_device_train_batch_size": 2, **changes})  # fmt: skip


@dataclass
class Verdict:
    """What was said of one family, method and packing.

    Args:
        check: `ok`, or the sentences of the refusal, or the name and words of an exception.
        run: likewise.
        advice: where the check's advice leads: the options that were set, and what the check says then.
        fault: what is wrong with it; None where check and run agree and the advice holds.
    """

    family: str
    method: str
    packing: bool
    check: str
    run: str
    advice: list[tuple[str, str]] = field(default_factory=list)
    fault: str | None = None
    seconds: float = 0.0


def verdicts(family: str, folder: Path) -> dict[str, Any]:
    """A verdict for each method, packed and not; or why there is no small model of the family."""
    try:
        save_small(folder / "model", family)
    except Exception as error:  # families raise what they like
        return {"family": family, "unknown": _words(error), "verdicts": []}
    found = [_verdict(family, folder, *case) for case in product(("full", "lora"), (True, False))]
    return {"family": family, "unknown": None, "verdicts": [asdict(verdict) for verdict in found]}


def _verdict(family: str, folder: Path, method: str, packing: bool) -> Verdict:
    began, options = time.monotonic(), {"method": method, "packing": packing, "cache_dir": str(folder / "cache")}
    verdict = Verdict(family, method, packing, _check(folder, options), _run(folder, options))
    verdict.advice, contradiction = _follow(folder, options, verdict.check)
    verdict.fault = disagreement(verdict) or contradiction
    verdict.seconds = round(time.monotonic() - began, 1)
    return verdict


def _check(folder: Path, options: dict[str, Any]) -> str:
    try:
        check(config_for(folder / "model", **options), load_strategy("single"), has_gpu=False)
    except ConfigError as error:
        return "; ".join(error.lines)
    except Exception as error:  # a traceback for the user
        traceback.print_exc()
        return _words(error)
    return _OK


def _run(folder: Path, options: dict[str, Any]) -> str:
    try:
        result = Steps(config_for(folder / "model", **options), lambda section, step: None).take(0)
    except ConfigError as error:
        return "; ".join(error.lines)
    except Exception as error:  # as above
        traceback.print_exc()
        return _words(error)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)  # the next one in this process is another
        GradientState._reset_state()
    return _OK if math.isfinite(result.loss) else f"TrainingError: the loss is {result.loss}"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _is_crash(said: str) -> bool:
    return re.match(r"\w+(Error|Exception): ", said) is not None


def disagreement(verdict: Verdict) -> str | None:
    """What is wrong between check and run; None where they say the same and neither crashes."""
    for name, said in (("check", verdict.check), ("run", verdict.run)):
        if _is_crash(said):
            return f"the {name} crashes"
    if verdict.check == verdict.run:
        return None
    if _OK in (verdict.check, verdict.run):
        return "check and run disagree"
    return "check and run give different reasons"


def _follow(folder: Path, options: dict[str, Any], said: str) -> tuple[list[tuple[str, str]], str | None]:
    """Does what a refusal advises, and what the next one advises; returns the way, and why it leads nowhere."""
    steps: list[tuple[str, str]] = []
    seen = [options]
    while (advice := _advised(said)) is not None:
        options = {**options, **advice}
        if options in seen:
            return steps, f"the advice goes in a circle: {advice}"
        seen.append(options)
        said = _check(folder, options)
        steps.append((" ".join(f"{name}={value}" for name, value in advice.items()), said))
        if _is_crash(said):
            return steps, "the advice leads to a crash"
    return steps, None


def _advised(said: str) -> dict[str, Any] | None:
    """The options that a refusal asks for; None where it asks for something else, such as another model."""
    found = _ADVICE.search(said)
    named = re.findall(r"\b(\w+)=(\w+)", found.group(1)) if found else []
    asked = {name: {"true": True, "false": False}.get(value, value) for name, value in named}
    return {name: value for name, value in asked.items() if name in TrainConfig.model_fields} or None
