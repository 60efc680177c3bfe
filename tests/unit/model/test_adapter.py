"""Adapters from files: what is not whole, no LoRA, or made for another base is refused before a weight is set."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families import config_for as config
from tests.families import save_small as saved
from trainers.embedded import BASE_DIR
from trainers.model.adapter import Adapter
from trainers.model.load import load_base
from trainers.model.lora import add_adapters

Tensors = dict[str, torch.Tensor]
WEIGHTS, SETTINGS, FIRST = "adapter_model.safetensors", "adapter_config.json", "layers.0.mlp.down_proj"


def adapter_of(base: Path, folder: Path, **options: Any) -> Path:
    """An adapter on a small base, saved; its second matrices are not zero, as after training."""
    model: Any = add_adapters(load_base(config(base, method="lora")), config(base, method="lora", **options))
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.normal_()
    model.save_pretrained(folder)
    return folder


def attached(base: Path, folder: Path) -> Any:
    return Adapter.read(folder, str(base)).attach(load_base(config(base, method="lora")))


def with_weights(change: Callable[[Tensors], Tensors], folder: Path) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def with_settings(folder: Path, **changes: Any) -> None:
    path = folder / SETTINGS
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def as_fifo(name: str, folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


def one_layer_more(tensors: Tensors) -> Tensors:
    return tensors | {name.replace("layers.0.", "layers.9."): one.clone() for name, one in tensors.items()}


UNFIT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing tensors": (
        partial(with_weights, lambda tensors: {name: one for name, one in tensors.items() if FIRST not in name}),
        rf"needs are not in it: base_model\.model\.model\.{FIRST}\.lora_A\.weight, .*lora_B\.weight$",
    ),
    "a layer more": (partial(with_weights, one_layer_more), r"does not have .*layers\.9.* and 11 more$"),
    "another tensor": (
        partial(with_weights, lambda tensors: tensors | {"value_head.weight": torch.ones(3)}),
        r"^the model does not have value_head\.weight$",
    ),
    "another rank in its config": (partial(with_settings, r=3), r"lora_A\.weight is 8x48 in it and 3x48 in the model"),
    "another kind": (partial(with_settings, peft_type="IA3"), r"peft_type in its adapter_config.json is 'IA3'"),
    "another variant": (partial(with_settings, use_dora=True), r"not in it: .*lora_magnitude_vector"),
    "another base": (
        partial(with_settings, base_model_name_or_path="owner/other"), r"names the base owner/other, and the run's base"
    ),
    "weights as a pipe": (partial(as_fifo, WEIGHTS), "not a regular file"),
    "config as a pipe": (partial(as_fifo, SETTINGS), "not a regular file"),
    "only a pickle": (as_pickle, r"it has no adapter_model\.safetensors; adapter_model\.bin is a pickle"),
    "a list as config": (lambda folder: (folder / SETTINGS).write_text("[]"), "peft_type .* is None"),
    "options that peft lacks": (partial(with_settings, r="many"), "cannot be used"),
    "cut short": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-50]), "damaged or truncated"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("fault", UNFIT)
def test_an_adapter_that_does_not_belong_to_the_base_is_refused(fault: str, base: Path, tmp_path: Path) -> None:
    folder = adapter_of(base, tmp_path / "adapter", lora_r=8)
    change, message = UNFIT[fault]
    change(folder)
    name = "owner/base" if fault == "another base" else str(base)
    with pytest.raises((ValueError, OSError), match=message):
        Adapter.read(folder, name).attach(load_base(config(base, method="lora")))


def test_an_adapter_gets_its_own_weights(base: Path, tmp_path: Path) -> None:
    """Also one on the embedding, beside which peft writes the embedding itself."""
    for number, targets in enumerate((["all-linear"], ["embed_tokens", "q_proj"])):
        folder = adapter_of(base, tmp_path / str(number), lora_target_modules=targets)
        state = attached(base, folder).state_dict()
        for name, tensor in load_file(folder / WEIGHTS).items():
            known = name if name in state else name.replace(".weight", ".default.weight")
            known = known if known in state else f"{name}.default"
            assert torch.equal(state[known], tensor), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, r"not in it: .*layers\.2\."),
        ({"num_hidden_layers": 1}, r"does not have .*layers\.1\."),
        ({"intermediate_size": 64}, r"down_proj\.lora_A\.weight is 16x48 in it and 16x64 in the model \(so are"),
    ],
)
def test_an_adapter_of_a_base_of_other_sizes_is_refused(
    changes: dict[str, Any], message: str, base: Path, tmp_path: Path
) -> None:
    targets = ["q_proj", "down_proj"]  # of so few layers peft writes `all-linear` with the number of each
    folder = adapter_of(base, tmp_path / "adapter", lora_target_modules=targets)
    other = saved(tmp_path / "other", **changes)
    with pytest.raises(ValueError, match=message):
        attached(other, folder)


def test_a_base_in_another_folder_is_no_other_base(base: Path, tmp_path: Path) -> None:
    """Folders move; what shows another one are its tensors."""
    folder = adapter_of(base, tmp_path / "adapter")
    for name in ("/elsewhere/base", str(BASE_DIR), "owner/base"):
        with_settings(folder, base_model_name_or_path=name)
        Adapter.read(folder, str(base))
    Adapter.read(folder, "owner/base")
