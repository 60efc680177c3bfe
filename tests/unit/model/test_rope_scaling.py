"""RoPE scaling: what it writes into the model's config, what it refuses, and that the model is stock transformers'."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from tests.rounding import bound
from tests.unit.model.test_rotary import LENGTHS, apart, documents, gradients, padded_inputs, together
from tests.unit.objectives.test_sft_loss import TINY
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.validation import build, ignored_choices
from trainers.model.load import load_base
from trainers.model.rope_scaling import position_limit, refuse_unscaled, scale_rope
from trainers.parallel.sequence import refuse_unsplittable_rows
from trainers.run.compatibility import plain, refusals
from trainers.strategy.mesh import MeshSizes

ORIGINAL, FACTOR = 16, 4
THETA = 100.0
STOCK: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0},
}  # fmt: skip
"""As a published config.json has them."""


def options(kind: str = "yarn", **changes: Any) -> TrainConfig:
    given = {"model_name_or_path": "embedded", "dataset_name": "embedded", "method": "full", "rope_scaling": kind}
    return build({**given, "rope_factor": FACTOR, **changes})


def model_config(family: str = "llama", **changes: Any) -> Any:
    return AutoConfig.for_model(family, **{**TINY, "max_position_embeddings": ORIGINAL, **changes})


def llama31() -> Any:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip
    return model_config(max_position_embeddings=131_072, rope_parameters=rope)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a short context, whose weights make positions matter."""
    torch.manual_seed(0)
    plainly = {"rope_type": "default", "rope_theta": THETA}
    model = AutoModelForCausalLM.from_config(model_config(rope_parameters=plainly))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    return folder


def one_at_a_time(model: Any) -> tuple[float, torch.Tensor]:
    """Summed loss and gradients of a stock model that has seen nothing before each document."""
    loss, gradient = 0.0, torch.zeros(())
    for tokens in documents():
        fresh, ids = copy.deepcopy(model), torch.tensor([tokens])
        logits = fresh(input_ids=ids, use_cache=False).logits[0, :-1]
        summed = functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        summed.backward()
        loss, gradient = loss + summed.item(), gradient + gradients(fresh)
    return loss, gradient


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("kind", STOCK)
def test_a_scaled_model_is_stock_transformers_with_the_same_config(kind: str, packed: bool, base: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": THETA, **STOCK[kind]}
    length = ORIGINAL if kind == "dynamic" else FACTOR * ORIGINAL
    stock = AutoModelForCausalLM.from_pretrained(base, rope_parameters=rope, max_position_embeddings=length)
    ours = load_base(options(kind, model_name_or_path=str(base)))
    assert max(LENGTHS) > ORIGINAL
    assert ours.config.rope_parameters == stock.config.rope_parameters
    assert ours.config.max_position_embeddings == stock.config.max_position_embeddings
    wanted = one_at_a_time(stock)
    assert all(found <= bound(1e-6) for found in apart(together(ours, packed), wanted))
    unscaled = load_base(options("none", model_name_or_path=str(base)))
    assert max(apart(together(unscaled, packed), wanted)) > 1e-3, "control: the model without it"


def test_the_positions_of_unpacked_rows_are_those_of_their_documents() -> None:
    assert padded_inputs()["position_ids"].max() + 1 == max(LENGTHS), "control: dynamic scaling depends on them"


@pytest.mark.parametrize("kind", STOCK)
def test_the_positions_that_a_scaled_model_supports(kind: str) -> None:
    shape = model_config()
    assert position_limit(shape) == ORIGINAL
    line = scale_rope(options(kind), shape)
    assert line == f"rope_scaling={kind}: 16 positions x 4 = 64"
    assert position_limit(shape) == FACTOR * ORIGINAL
    longer = model_config()
    scale_rope(options(kind, rope_original_max_positions=32), longer)
    assert position_limit(longer) == FACTOR * 32
    assert scale_rope(options("none", rope_factor=None), shape) is None


def test_what_the_family_has_of_its_own_stays() -> None:
    rope = {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.5}
    shape = model_config("gpt_neox", rope_parameters=rope)
    scale_rope(options("linear"), shape)
    assert shape.rope_parameters == {**rope, "rope_type": "linear", "factor": 4.0}
    mixtral = AutoConfig.for_model("mixtral", hidden_size=32, num_attention_heads=4, head_dim=None)
    scale_rope(options("yarn"), mixtral)
    assert mixtral.head_dim == 8, "transformers' formula for yarn takes no None"


def test_a_scaling_of_the_model_is_replaced_and_named() -> None:
    shape = llama31()
    line = scale_rope(options("yarn", rope_factor=32), shape)
    assert line == (
        "rope_scaling=yarn: 8,192 positions x 32 = 262,144; it replaces the model's own llama3 scaling (factor 8, "
        "original 8,192)"
    )
    assert shape.rope_parameters == {
        "rope_type": "yarn", "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192
    }  # fmt: skip
    same = model_config(
        max_position_embeddings=64,
        rope_parameters={"rope_type": "yarn", "rope_theta": 7.0, "factor": 4.0, "truncate": False, "beta_fast": 30.0,
                         "attention_factor": 1.1, "original_max_position_embeddings": 16},
    )  # fmt: skip
    scale_rope(options("yarn", rope_factor=8), same)
    rope = same.rope_parameters
    assert (rope["factor"], rope["truncate"], rope["beta_fast"]) == (8.0, False, 30.0)
    assert "attention_factor" not in rope, "it follows from the factor"


def test_only_the_layers_that_see_the_whole_row_are_scaled() -> None:
    shape = AutoConfig.for_model("gemma3_text", max_position_embeddings=ORIGINAL)
    before = copy.deepcopy(shape.rope_parameters)
    line = scale_rope(options(), shape)
    assert line is not None
    assert "in the full_attention layers; the others keep theirs" in line
    assert shape.rope_parameters["sliding_attention"] == before["sliding_attention"]
    assert shape.rope_parameters["full_attention"] == {
        **before["full_attention"], "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL
    }  # fmt: skip


PHI3 = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 16}  # fmt: skip


def test_a_family_with_a_length_beside_its_rope_parameters() -> None:
    shape = model_config("phi3", original_max_position_embeddings=16, max_position_embeddings=64, rope_parameters=PHI3)
    scale_rope(options(rope_original_max_positions=32), shape)
    assert shape.original_max_position_embeddings == 32
    assert shape.rope_parameters.keys().isdisjoint({"short_factor", "long_factor"})
    shape.standardize_rope_params()
    assert shape.rope_parameters["original_max_position_embeddings"] == 32, "it would win"


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "learned positions": (lambda: AutoConfig.for_model("gpt2"), {}, "gpt2 models have no rotary embeddings"),
    "alibi": (lambda: AutoConfig.for_model("falcon", alibi=True), {}, "falcon models have no rotary embeddings"),
    "layer types of its own": (
        lambda: AutoConfig.for_model("deepseek_v4"), {}, "deepseek_v4 has rotary embeddings by layer type.*compress"
    ),
    "another form": (
        lambda: AutoConfig.for_model("gemma4_text"), {}, "gemma4_text has proportional rotary embeddings"
    ),
    "scaled attention": (
        lambda: AutoConfig.for_model("ministral3"), {}, "ministral3 also scales its attention by position"
    ),
    "an unknown original": (
        lambda: model_config(rope_parameters=LINEAR), {},
        r"llama has linear scaling \(factor 8\), and does not say .*; give rope_original_max_positions",
    ),
    "shorter than it is": (
        llama31, {}, r"rope_factor=4 x 8,192 positions reach 32,768, and llama has 131,072; use a rope_factor of 16",
    ),
    "code of its own": (
        lambda: model_config(auto_map={"AutoModelForCausalLM": "x.Y"}), {"trust_remote_code": True}, "code of its own"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_scaled_is_refused_by_name(case: str) -> None:
    make, changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=f"^rope_scaling=yarn: .*{message}"):
        scale_rope(options(**changes), make())


def test_a_linear_scaling_with_a_given_original_is_replaced() -> None:
    shape = model_config(rope_parameters=LINEAR, max_position_embeddings=64)
    scale_rope(options(rope_original_max_positions=16), shape)
    assert shape.rope_parameters["rope_type"] == "yarn"


def test_a_model_that_does_not_follow_its_config_is_refused() -> None:
    with torch.device("meta"):
        plainly = AutoModelForCausalLM.from_config(model_config())
    refuse_unscaled(options("none"), plainly)
    with pytest.raises(ConfigError, match="rope_scaling=yarn: llama models do not follow it"):
        refuse_unscaled(options(), plainly)


def test_rows_are_not_split_where_frequencies_depend_on_their_length() -> None:
    for kind in STOCK:
        shape = model_config()
        scale_rope(options(kind), shape)
        if kind == "dynamic":
            with pytest.raises(ConfigError, match="chooses its rotary frequencies by the longest position"):
                refuse_unsplittable_rows(shape, MeshSizes(cp=2))
        else:
            refuse_unsplittable_rows(shape, MeshSizes(cp=2))


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match=r"rope_scaling=yarn needs rope_factor"):
        options(rope_factor=None)
    with pytest.raises(ConfigError, match=r"rope_factor=1 is refused: input should be greater than 1"):
        options(rope_factor=1)
    with pytest.raises(ConfigError, match=r"rope_scaling='ntk' is not one of|rope_scaling"):
        options("ntk")
    idle = options("none", rope_original_max_positions=16)
    assert [str(line) for line in ignored_choices(idle)] == [
        "rope_factor is ignored: rope_scaling=none",
        "rope_original_max_positions is ignored: rope_scaling=none",
    ]
    assert not ignored_choices(options())


def test_a_run_is_not_resumed_with_another_scaling() -> None:
    manifest = {"config": plain(options()), "step": 3, "versions": {}}
    assert not refusals(manifest, plain(options()), {})
    for changed in (options("linear"), options(rope_factor=8), options(rope_original_max_positions=16)):
        assert len(refusals(manifest, plain(changed), {})) == 1
