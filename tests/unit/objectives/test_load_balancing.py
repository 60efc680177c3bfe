"""The load-balancing loss: transformers' own, counted over the global batch, however that is split."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.parity.runs import mostly_long
from tests.rounding import ORDERS, bound, relative, reordered
from tests.steps import Steps, steps
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.data.layout import AttentionMetadata
from trainers.embedded import BASE_DIR
from trainers.model.load import load_model_config
from trainers.model.small_model import small_config
from trainers.objectives import load_balancing
from trainers.objectives.load_balancing import FAMILIES, LoadBalancing, balancing_lines, weighted_probabilities
from trainers.strategy.strategy import load_strategy
from trainers.tools.preflight import check

COEFFICIENT = 0.5
"""So large that the loss shows in the gradients."""
SIZES: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "num_local_experts": 4,
    "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": COEFFICIENT,
    "initializer_range": 0.2,
}  # fmt: skip
SHORT = ["mixtral", "gpt_oss", "granitemoe", "jetmoe", "qwen3_5_moe_text"]


def saved(folder: Path, family: str = "mixtral", **changes: Any) -> Path:
    """A folder with a small model's config and the embedded tokenizer; its weights are the seed's."""
    folder.mkdir(exist_ok=True, parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BASE_DIR / name, folder)
    AutoConfig.for_model(family, **SIZES | changes).save_pretrained(folder)
    return folder


def config(folder: Path, **changes: Any) -> TrainConfig:
    return build({"model_name_or_path": str(folder), "dataset_name": "embedded", "random_init": True, "method": "full",
                  "eval_dataset_name": "none", **changes})  # fmt: skip


def refusal(folder: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as told:
        load_model_config(config(folder, **changes))
    (line,) = told.value.lines
    return line


@pytest.mark.parametrize("family", mostly_long(sorted(FAMILIES), SHORT))
def test_one_micro_batch_has_the_loss_of_the_familys_own_forward_pass(family: str) -> None:
    small = small_config(AutoConfig.for_model(family))
    small.output_router_logits = True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
    ids, real = torch.randint(1, 60, (3, 20)), torch.ones(3, 20, dtype=torch.bool)
    output = model(input_ids=ids, use_cache=False)
    balancing = LoadBalancing.of(model.config.get_text_config())
    assert balancing is not None
    own_factor = getattr(model, balancing.name)
    assert balancing.coefficient == own_factor
    term, weights = balancing.balance_term(balancing.count(output.router_logits, real))
    limit = bound(0.0)
    assert relative(term, output.aux_loss.double()) < limit
    assert relative(weighted_probabilities(output.router_logits, real, weights), output.aux_loss) < limit


def gradients(taken: Steps) -> dict[str, torch.Tensor]:
    return {name: one.grad.clone() for name, one in taken.loss.model.named_parameters() if one.grad is not None}


def first_step(folder: Path, micro_rows: int, packing: bool, **more: Any) -> tuple[dict[str, torch.Tensor], Any, Any]:
    """Gradients and result of a step of 8 rows as the loop takes it, without its update; its documents and model."""
    changes = {"method": "full", "random_init": True, "model_name_or_path": str(saved(folder / "model")),
               "global_batch_size": 8, "per_device_train_batch_size": micro_rows, "max_grad_norm": 0.0}  # fmt: skip
    with steps(folder, 1, packing, **changes | more) as taken:
        taken.context.backend.step = lambda: None  # type: ignore[method-assign]
        result = taken.take(0)
        plan, rows = taken.context.plan, taken.context.plan.rows
        members = [rows.members[rows.offsets[row] : rows.offsets[row + 1]] for row in plan.rows_of(0)]
        documents = [rows.documents.document(int(one)) for group in members for one in group]
        assert len(plan.batch(0, 0).micro_batches) == 8 // micro_rows
        return gradients(taken), result, (documents, taken.loss.model)


def expected(
    model: Any, documents: list[Any], split: int = 1, padding: bool = False, factor: float = COEFFICIENT
) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients of the loss with transformers' own function, one document to a row, in a plain way.

    Args:
        split: of how many micro-batches the means are taken, as transformers does it; 1: of the global batch.
        padding: count it too.
    """
    model.zero_grad()
    width, trained = max(len(ids) for ids, _ in documents), sum(int(mask[1:].sum()) for _, mask in documents)
    size = -(-len(documents) // split)
    groups = [documents[start : start + size] for start in range(0, len(documents), size)]
    aux_losses = []
    for group in groups:
        ids, real = torch.zeros(len(group), width, dtype=torch.long), torch.zeros(len(group), width, dtype=torch.long)
        labels = torch.full((len(group), width), -100)
        for row, (tokens, mask) in enumerate(group):
            there = torch.from_numpy(tokens.astype("int64"))
            ids[row, : len(there)], real[row, : len(there)] = there, 1
            labels[row, : len(there)] = there.where(torch.from_numpy(mask.astype(bool)), torch.tensor(-100))
        arguments = {"output_router_logits": True, "attention_metadata": AttentionMetadata()}
        output = model(input_ids=ids, use_cache=False, **arguments)
        loss = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        aux: Any = load_balancing_loss_func(output.router_logits, 4, 2, None if padding else real)
        aux_losses.append(float(aux.detach()))
        (loss / trained + factor * aux / len(groups)).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters()}, sum(aux_losses) / len(aux_losses)


def apart(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert mine.keys() == theirs.keys()
    return max(relative(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("packing", [True, False])
def test_a_step_has_the_gradient_of_transformers_loss_over_the_global_batch(packing: bool, tmp_path: Path) -> None:
    mine, result, (documents, model) = first_step(tmp_path, 2, packing)
    wanted, aux = expected(model, documents)
    spreads = []
    for order in ORDERS:
        with reordered(order):
            spreads.append(apart(expected(model, documents)[0], wanted))
    limit = bound(*spreads)
    assert apart(mine, wanted) < limit
    assert result.extra["aux_loss"] == pytest.approx(aux, rel=limit)
    # Controls: without the term, with padding counted, and with the means of each micro-batch.
    assert apart(expected(model, documents, factor=0.0)[0], wanted) > 10 * limit
    assert apart(expected(model, documents, padding=True)[0], wanted) > 10 * limit
    assert apart(expected(model, documents, split=4)[0], wanted) > 10 * limit


@pytest.mark.parametrize("more", [{"per_device_train_batch_size": 8}, {"gradient_checkpointing": True}])
def test_micro_batches_and_checkpointing_change_nothing(more: dict[str, Any], tmp_path: Path) -> None:
    plain, told, _ = first_step(tmp_path, 1, False)
    with reordered("backwards"):
        spread = apart(first_step(tmp_path, 1, False)[0], plain)
    other, also, _ = first_step(tmp_path, more.pop("per_device_train_batch_size", 1), False, **more)
    assert apart(other, plain) < bound(spread)
    assert also.extra["aux_loss"] == pytest.approx(told.extra["aux_loss"], rel=bound(spread))
    assert also.loss == pytest.approx(told.loss, rel=bound(spread))


def dropped_out(folder: Path, coefficient: float) -> dict[str, torch.Tensor]:
    """Gradients of adapters under dropout."""
    model = str(saved(folder, router_aux_loss_coef=coefficient))
    lora = {"method": "lora", "merge_adapter": True, "lora_dropout": 0.5, "lora_target_modules": ["q_proj", "v_proj"]}
    return first_step(folder, 2, False, model_name_or_path=model, **lora)[0]


def test_dropout_falls_on_both_passes_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that counts takes no random numbers from the other: they would be other numbers than without it."""
    without = dropped_out(tmp_path / "without", 0.0)
    assert apart(dropped_out(tmp_path / "tiny", 1e-12), without) < bound(0.0)
    monkeypatch.setattr(load_balancing, "_same_random_numbers", lambda device: nullcontext())
    assert apart(dropped_out(tmp_path / "control", 1e-12), without) > 0.1


def test_the_start_says_what_is_balanced_and_what_it_costs(tmp_path: Path) -> None:
    shape = load_model_config(config(saved(tmp_path)))
    (line,) = balancing_lines(LoadBalancing.of(shape))
    assert line.startswith("load-balancing loss: router_aux_loss_coef=0.5, over the global batch")
    assert balancing_lines(None) == []


@pytest.mark.parametrize("changes", [{"output_router_logits": False}, {"router_aux_loss_coef": 0.0}])
def test_a_model_that_does_not_ask_for_it_has_none(changes: dict[str, Any], tmp_path: Path) -> None:
    assert LoadBalancing.of(load_model_config(config(saved(tmp_path, **changes), torch_compile=True))) is None


def test_a_family_whose_loss_is_another_is_refused(tmp_path: Path) -> None:
    assert refusal(saved(tmp_path, "doge")) == (
        "doge: its config.json asks for a load-balancing loss (output_router_logits=true, router_aux_loss_coef=0.5), "
        "which is not supported for this model; set output_router_logits to false there to train without it"
    )


def test_compiled_layers_are_refused(tmp_path: Path) -> None:
    assert refusal(saved(tmp_path), torch_compile=True).startswith("torch_compile=true with mixtral, whose config.json")


def test_the_check_refuses_it_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="torch_compile=true with mixtral"):
        check(config(saved(tmp_path), torch_compile=True), load_strategy("single"), has_gpu=False)
