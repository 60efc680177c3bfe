"""Every preset: complete, honest in its header, and built on the meta device from its model's published shape.

`architectures/` holds, for each model that a preset names, the part of its config.json that decides its shape, and
`safetensors_total`: the number of weights that the Hub counts in its safetensors files
(`https://huggingface.co/api/models/REPOSITORY`, key `safetensors.total`). No weights and no network are needed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from app.plan.estimate import GIB, Hardware, candidate, case_of, plan_row
from tests.parity.runs import mostly_long
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.config.parse import PRESETS_DIR, Request, preset_strategies, preset_summary
from trainers.data.layout import use_documents
from trainers.model.attention import KERNELS
from trainers.model.load import _check_layers, add_adapters
from trainers.model.quantization import refuse_unfit
from trainers.objectives.sft import LINEAR_HEADS
from trainers.strategy.strategy import load_strategy
from trainers.tools.memory_estimate import weigh

FILES = sorted(PRESETS_DIR.rglob("*.yaml"))
NAMES = [path.stem for path in FILES]
HUB_NAMES = [name for name in NAMES if not name.startswith("tiny-")]
FACTS = {path.stem: json.loads(path.read_text()) for path in Path(__file__).parent.parent.glob("architectures/*.json")}
STRATEGIES = {path.stem for path in (Path(__file__).parents[3] / "accelerate_configs").glob("*.yaml")}
METHODS = ("full", "lora", "qlora")
GPUS = {"one GPU": 1, "two GPUs": 2, "eight GPUs": 8}


def base_of(name: str) -> str:
    """`qwen3-8b-lora` -> `qwen3-8b`."""
    return name.rpartition("-")[0]


def header(name: str) -> dict[str, str]:
    """The `Key: value` lines of a preset's header."""
    comments = re.match(r"(#.*\n)+", (PRESETS_DIR / f"{name}.yaml").read_text(encoding="utf-8"))
    assert comments
    return dict(line[2:].split(": ", 1) for line in comments[0].splitlines()[2:])


def strategies(name: str) -> dict[int, list[str]]:
    """The strategies that the header names, by number of GPUs; none is an empty list."""
    parts = header(name)["Strategies"].rstrip(".").split("; ")
    said = dict(part.split(": ", 1) for part in parts)
    return {GPUS[count]: re.sub(r" \(.*?\)|^none.*", "", names).split(", ") for count, names in said.items()}


def shape_of(facts: dict[str, Any], **changes: Any) -> Any:
    values = {**facts["config"], **changes}
    return AutoConfig.for_model(values.pop("model_type"), **values)


def on_meta(shape: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape, attn_implementation=KERNELS["sdpa"])


def count(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def stored(facts: dict[str, Any], model: Any) -> int:
    """The weights in the model's files: its own, and the output head again where they hold a tied one twice."""
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    if facts.get("tied_head_stored"):
        assert head is embedding
    return count(model) + (head.numel() if facts.get("tied_head_stored") else 0)


def adapted(model: Any, config: TrainConfig) -> int:
    """The adapter weights that the preset should get: r for each row and column of each linear layer but the head."""
    chosen, head = config.lora_target_modules, model.get_output_embeddings()
    layers = [
        part
        for name, part in model.get_decoder().named_modules()
        if isinstance(part, nn.Linear)
        and part is not head
        and (chosen == ["all-linear"] or name.endswith(tuple(chosen)))
    ]
    return sum(config.lora_r * (layer.in_features + layer.out_features) for layer in layers)


def test_each_model_comes_in_each_method() -> None:
    assert set(HUB_NAMES) == {f"{base}-{method}" for base in FACTS for method in METHODS}
    assert set(NAMES) - set(HUB_NAMES) == {"tiny-full", "tiny-lora"}
    assert all(path.parent == PRESETS_DIR for path in FILES), "the command line looks in one folder"


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_named_after_what_it_trains(name: str) -> None:
    config = Request(preset=name).resolve()
    model = config.model_name_or_path
    assert config.method == name.rpartition("-")[2]
    assert model == (EMBEDDED if name not in HUB_NAMES else FACTS[base_of(name)]["repository"])


@pytest.mark.parametrize("name", NAMES)
def test_the_header_says_what_a_user_must_know(name: str) -> None:
    lines = header(name)
    assert 20 < len(preset_summary(name)) <= 118
    assert lines["Command"] == f"tunesmith train {name}"
    assert name not in HUB_NAMES or lines["Own data"].startswith(f"tunesmith train {name} --dataset_name my.jsonl ")
    assert {"Memory", "Hardware", "Strategies"} <= set(lines)
    assert re.search(r"GiB.*(estimate: |, measured)", lines["Memory"])


@pytest.mark.parametrize("name", NAMES)
def test_the_strategies_it_names_exist_and_share_its_batch_out(name: str) -> None:
    config, named = Request(preset=name).resolve(), strategies(name)
    assert list(named) == [1, 2, 8]
    assert set(named[1]) <= {"single", ""}
    supported = {"single", "ddp", "fsdp2"} if config.method == "qlora" else STRATEGIES
    for gpus, chosen in named.items():
        assert set(chosen) <= supported | {""}
        assert chosen == [""] or config.global_batch_size % gpus == 0
    listed = {entry.gpus: list(entry.names) or [""] for entry in preset_strategies(name)}
    assert listed == named, "as the launcher reads it"
    assert all(
        (entry.remark != "") == (not entry.names) for entry in preset_strategies(name) if "RAM" not in entry.remark
    )


@pytest.mark.parametrize("name", HUB_NAMES)
def test_the_published_model_is_built_with_the_presets_method(name: str) -> None:
    config, facts = Request(preset=name).resolve(), FACTS[base_of(name)]
    shape = shape_of(facts)
    _check_layers(config, shape)
    assert config.max_length <= shape.get_text_config().max_position_embeddings
    model = on_meta(shape)
    assert stored(facts, model) == facts["safetensors_total"]
    assert shape.get_text_config().model_type in LINEAR_HEADS
    assert isinstance(model.get_output_embeddings(), nn.Linear)
    if config.method != "full":
        expected, text = adapted(model, config), model.get_decoder()
        adapters: Any = add_adapters(model, config)
        trained = [weight for weight in adapters.parameters() if weight.requires_grad]
        assert sum(weight.numel() for weight in trained) == expected > 0
        inside = {id(weight) for weight in text.parameters()}
        assert all(id(weight) in inside for weight in trained), "text reaches the decoder only"


@pytest.mark.parametrize("base", FACTS)
def test_a_row_passes_through_and_its_linear_layers_can_be_quantised(base: str) -> None:
    shape = shape_of(FACTS[base])
    refuse_unfit(shape, trust_remote_code=False)
    ids = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    use_documents(None)
    logits = on_meta(shape)(input_ids=ids, position_ids=ids, use_cache=False).logits
    assert logits.shape == (1, 8, shape.get_text_config().vocab_size)


@pytest.mark.parametrize("base", ["qwen3-0.6b", "llama-3.1-8b"])
@pytest.mark.parametrize("wrong", ["num_hidden_layers", "intermediate_size", "num_key_value_heads"])
def test_a_wrong_fact_does_not_match(base: str, wrong: str) -> None:
    facts = FACTS[base]
    value = facts["config"][wrong]
    model = on_meta(shape_of(facts, **{wrong: value // 2 if wrong.endswith("heads") else value - 1}))
    assert stored(facts, model) != facts["safetensors_total"]


def test_a_header_without_strategies_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.PRESETS_DIR", tmp_path)
    (tmp_path / "x-full.yaml").write_text("# A preset\n#\n# Command: tunesmith train x-full\nmethod: full\n")
    with pytest.raises(KeyError, match="Strategies"):
        strategies("x-full")


@pytest.mark.parametrize("name", HUB_NAMES)
def test_the_methods_of_a_model_differ_where_they_must(name: str) -> None:
    """LoRA learns at about ten times the rate of full fine-tuning; the data is the same."""
    mine, full = (yaml.safe_load((PRESETS_DIR / f"{one}.yaml").read_text()) for one in (name, f"{base_of(name)}-full"))
    own = {"method", "learning_rate", "weight_decay", "mixed_precision", "per_device_train_batch_size"}
    own |= {"per_device_eval_batch_size", "lora_r", "lora_alpha", "lora_target_modules"}
    assert {key: value for key, value in mine.items() if key not in own} == {
        key: value for key, value in full.items() if key not in own
    }
    rates = [float(values["learning_rate"]) for values in (mine, full)]
    assert rates[0] == rates[1] if mine["method"] == "full" else 1.5 <= rates[0] / rates[1] <= 10.1


@pytest.mark.parametrize(
    "name",
    mostly_long(
        HUB_NAMES,
        [
            "llama-3.1-8b-full",
            "llama-3.3-70b-full",
            "gemma-3-12b-lora",
            "phi-4-full",
            "qwen3-32b-lora",
            "qwen3-8b-qlora",
        ],
    ),
)
def test_the_gpus_it_names_hold_it_by_the_plan(name: str) -> None:
    """Each strategy of the header on its numbers of GPUs; where it says `none`, one GPU is about full at least."""
    config, told = Request(preset=name).resolve(), header(name)
    [room] = map(int, re.findall(r"^(?:a GPU with|GPUs with|any GPU with) (\d+) GiB", told["Hardware"]))
    named = [
        (load_strategy(one or "single"), gpus, bool(one)) for gpus, all_of in strategies(name).items() for one in all_of
    ]
    hardware = {gpus: Hardware("gpu", gpus, room * GIB, here=False) for _, gpus, _ in named}
    able = [(*candidate(one, config, hardware[gpus]), gpus, fits) for one, gpus, fits in named]
    cases = {case_of(one, changed) for one, changed, _, _ in able}
    counted = weigh(config, shape_of(FACTS[base_of(name)]), sorted(cases), here=False)
    found = [(plan_row(one, changed, counted, hardware[gpus]), fits) for one, changed, gpus, fits in able]
    assert all(row.fits if fits else row.total > 0.8 * room * GIB for row, fits in found)
    said = float(re.search(r"about ([\d.]+) GiB", told["Memory"])[1])  # type: ignore[index]
    inside = [row.total / GIB for row, fits in found if fits and not row.host]
    assert 0.35 * said < max(inside or [row.total / GIB for row, fits in found if fits]) < 1.3 * said
