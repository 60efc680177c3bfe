"""An export of a model with scaled RoPE gives the trainer's logits in stock transformers and peft."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.parity.runs import mostly_long
from tests.unit.checkpoint.test_export import config, saved_base, trained
from trainers.checkpoint import export
from trainers.model.attention import KERNELS
from trainers.objectives.loss_module import inner_model
from trainers.tools.chat import _full_model
from trainers.tools.score import load_model

POSITIONS, TOKENS = 64, 150
"""A row longer than the model supports, so that dynamic scaling has an effect."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = saved_base(tmp_path_factory.mktemp("base"), torch.float32)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": POSITIONS}))
    return folder


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(300, 300 + TOKENS)[None]
    output: torch.Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    return output


def as_the_card_says(folder: Path) -> Any:
    """What the Python code in the model card loads."""
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert code
    names: dict[str, Any] = {"folder": str(folder)}
    if (folder / "adapter_config.json").exists():  # where its reader has the base model
        names["base_folder"] = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    for line in code[1].splitlines():
        for name in re.findall(r"\b(?:Auto\w+|PeftModel|GenerationConfig)\b", line):
            names[name] = getattr(transformers, name, None) or getattr(peft, name)
    exec(code[1], names)  # noqa: S102 - our own
    return names["model"]


@pytest.mark.parametrize(
    ("kind", "scaling"),
    mostly_long(
        [("full", "yarn"), ("full", "dynamic"), ("merged", "yarn"), ("adapter", "yarn")],
        [("full", "yarn"), ("adapter", "yarn")],
    ),
)
def test_stock_libraries_give_the_trained_models_logits(kind: str, scaling: str, base: Path, tmp_path: Path) -> None:
    method = "full" if kind == "full" else "lora"
    choice = config(base, method=method, rope_scaling=scaling, rope_factor=4)
    model = trained(choice)
    inner_model(model).set_attn_implementation("eager")
    wanted, folder = logits(model), tmp_path / "model"
    inner_model(model).set_attn_implementation(KERNELS["eager"])
    checked = export.export(lambda _: model, choice, folder, kind, {})
    assert checked.deviation is not None
    assert checked.deviation <= checked.limit
    assert (logits(as_the_card_says(folder)) - wanted).abs().max() < 1e-4
    assert (logits(load_model(folder)[0]) - wanted).abs().max() < 1e-4, "our own programs"
    if kind == "adapter":
        plainly = AutoModelForCausalLM.from_pretrained(folder)
        assert (logits(plainly) - wanted).abs().max() > 1e-2, "control: the base as it is"
        assert f"Trained with rope_scaling={scaling}" in (folder / "README.md").read_text()
    else:
        chatted = _full_model(choice, folder)
        assert chatted.config.rope_parameters == AutoModelForCausalLM.from_pretrained(folder).config.rope_parameters
        assert chatted.config.rope_parameters["factor"] == 4, "not scaled twice"
        assert not (folder / "base").exists()


def test_an_adapter_without_scaling_needs_no_config_of_its_base(base: Path, tmp_path: Path) -> None:
    choice = config(base)
    export.export(lambda _: trained(choice), choice, tmp_path / "model", "adapter", {})
    assert not (tmp_path / "model" / "base").exists()
    assert "AutoPeftModelForCausalLM.from_pretrained(folder)" in (tmp_path / "model" / "README.md").read_text()
