"""`tunesmith plan`: what is counted against what torch allocates, the arithmetic, the order, and what it refuses."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from app.cli import run_verb
from app.plan_verb import plan_verb
from app.planner import CUDA_GIB, GIB, NCCL_GIB, Hardware, Row, best_first, candidate, plan_row, told_size
from trainers.config import ConfigError, TrainConfig, build
from trainers.models import build_model, compute_dtype, load_shape
from trainers.objectives.sft import SupervisedLoss
from trainers.parallel.mesh import MeshSizes
from trainers.parallel.stages import in_flight
from trainers.strategies import load_strategy
from trainers.weigh import case, empty_model, peak, weights

pytestmark = pytest.mark.usefixtures("elsewhere")

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 64


def config(**values: Any) -> TrainConfig:
    given = {"model_name_or_path": "embedded", "dataset_name": "embedded", "method": "full", "max_length": LENGTH}
    return build({**given, **values})


# -- counted against torch's own account -----------------------------------------------------------------------------


def allocated(settings: TrainConfig, rows: int) -> int:
    """Bytes that a forward and backward pass of the real model has allocated at most, as torch's profiler saw them."""
    model = SupervisedLoss(build_model(settings), compute_dtype(settings))
    model.train()
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    ids = torch.zeros(rows, LENGTH, dtype=torch.int64)
    places, every = torch.arange(LENGTH).expand(rows, LENGTH), torch.zeros(rows * LENGTH, dtype=torch.int64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        model(ids, places, None, every, every)[0].backward()
    now = most = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "selective_checkpointing": True},
        {"mixed_precision": "bf16"},
        {"method": "lora"},
        {"method": "lora", "mixed_precision": "bf16", "gradient_checkpointing": True},
    ],
)
@pytest.mark.parametrize("rows", [2, 8])
def test_a_micro_batch_needs_what_torch_allocates(options: dict[str, Any], rows: int) -> None:
    settings = config(**options)
    counted = peak(settings, empty_model(settings, load_shape(settings)), rows, LENGTH)
    # The stand-in for attention is no operator that selective checkpointing keeps; and products in bf16 have scratch.
    exact = settings.mixed_precision == "no" and not settings.selective_checkpointing
    close = 0.01 if exact else 0.06
    assert counted == pytest.approx(allocated(settings, rows), rel=close)


def test_the_count_sees_checkpointing() -> None:
    """The control: a count that were the same for all would pass above if the profiler's were too."""
    shape = load_shape(config())
    often, once = (
        peak(one, empty_model(one, shape), 8, LENGTH) for one in (config(), config(gradient_checkpointing=True))
    )
    assert once < 0.6 * often


def test_layers_add_up_to_the_whole_model() -> None:
    settings = config()
    shape = load_shape(settings)
    found, layers = case(settings, shape, "1:1:1:1:4"), shape.num_hidden_layers
    whole = peak(settings, empty_model(settings, shape), 4, LENGTH)
    assert found["fixed"] + layers * found["layer"] == pytest.approx(whole, rel=0.01)


def test_weights_are_those_of_the_model() -> None:
    for options in ({}, {"method": "lora", "mixed_precision": "bf16"}):
        settings = config(**options)
        model = build_model(settings)
        found = weights(settings, empty_model(settings, load_shape(settings)))
        trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
        frozen = sum(one.numel() * one.element_size() for one in model.parameters() if not one.requires_grad)
        assert found["trained_inside"] + found["trained_outside"] == trained
        assert found["frozen_inside"] + found["frozen_outside"] == frozen
        assert found["parameters"] == sum(one.numel() for one in model.parameters())


def test_tensor_parallel_leaves_half_of_the_matrices() -> None:
    settings = config()
    shape = load_shape(settings)
    whole, half = (weights(settings, empty_model(settings, shape, tp)) for tp in (1, 2))
    assert half["parameters"] == (whole["parameters"] - whole["vectors"]) / 2 + whole["vectors"]
    assert half["vectors"] == whole["vectors"]


def test_four_bit_weights_are_counted_as_such() -> None:
    half, nibble = (config(method=method, mixed_precision="bf16") for method in ("lora", "qlora"))
    shape = load_shape(half)
    one, other = (weights(settings, empty_model(settings, shape)) for settings in (half, nibble))
    assert other["frozen_inside"] < 0.3 * one["frozen_inside"]
    assert other["frozen_outside"] == one["frozen_outside"]  # embedding and head keep their dtype


# -- the arithmetic --------------------------------------------------------------------------------------------------

WEIGHTS = {"trained_inside": 800.0, "trained_outside": 200.0, "frozen_inside": 0.0, "frozen_outside": 0.0,
           "parameters": 1000.0, "parameters_outside": 200.0, "vectors": 90.0, "scales": 0.0}  # fmt: skip
CASE = {**WEIGHTS, "fixed": 50.0, "layer": 10.0}
COUNTED = {
    "layers": 8, "hidden": 10, "heads": 4, "key_heads": 2, "head_size": 3, "words": 20, "tied": False,
    "matmul_trained": 900, "matmul_frozen": 0, "all_linear": True, "layer_matmul": 100, "flops_per_second": 1e9,
    "process_bytes": 7.0, "whole": WEIGHTS,
    "cases": {f"{tp}:{cp}:{sp}:{stages}:{rows}": CASE for tp in (1, 2) for cp in (1, 2) for sp in (1, 2)
              for stages in (1, 2, 4) for rows in (1, 2, 4)},
}  # fmt: skip
"""Eight layers, and a head that costs as much as two of them."""


def row(name: str, processes: int = 2, kind: str = "cpu", memory: float = 1e9, **options: Any) -> Row:
    hardware = Hardware(kind, processes, memory)
    given = {"global_batch_size": 16, "per_device_train_batch_size": 4, **options}
    return plan_row(*candidate(load_strategy(name), config(**given), hardware), COUNTED, hardware)


def resting(name: str, processes: int = 2, **options: Any) -> list[float]:
    memory = row(name, processes, **options).memory
    assert memory
    return [memory[use] for use in ("weights", "gradients", "optimizer")]


def test_what_rests_where() -> None:
    assert resting("single") == resting("ddp") == [4000, 4000, 8000]
    assert resting("fsdp2") == resting("fsdp1") == [2000, 2000, 4000]
    assert resting("hsdp", 4) == [2000, 2000, 4000]
    # DeepSpeed updates a flat fp32 copy of the weights beside Adam's two states.
    assert resting("zero1") == [4000, 4000, 6000]
    assert resting("zero2") == [4000, 2000, 6000]
    assert resting("zero3", 4) == [1000, 1000, 3000]
    # Five layers and the embedding; the other rank has three and the head.
    assert resting("pp") == [4 * 600, 4 * 600, 8 * 600]
    # Stages of 2, 2, 3 and 1 layers. Where they turn, the first rank has three layers, embedding and head.
    assert resting("pp", pp_schedule="interleaved") == [4 * 600, 4 * 600, 8 * 600]
    assert resting("pp", pp_schedule="zbv") == [4 * 500, 4 * 500, 8 * 500]
    assert resting("fsdp2", optim="adamw_8bit", master_weights=False, mixed_precision="bf16") == [1000, 1000, 1015.625]


def test_what_is_whole_for_a_while() -> None:
    def gathered(name: str, processes: int = 2) -> float:
        memory = row(name, processes).memory
        assert memory
        return memory["gathered"]

    assert gathered("ddp") == 0
    # DeepSpeed's bucket, of which a CPU has what is used; under ZeRO 2 and 3 the largest gradient too.
    assert gathered("zero1") == 4 * 1000
    assert gathered("zero2") == 4 * (1000 + 200)
    assert gathered("fsdp2") == 4 * (200 + 2 * 100 + 200)  # outside, two layers, and the largest gradient
    assert gathered("fsdp1_grad_op") == 4 * (1000 + 200)
    assert gathered("pp_fsdp2", 4) == 4 * (600 + 600)  # a stage and its gradients to the step's end
    assert gathered("zero3") == 4 * (1000 + 200 + 1000)


def test_a_pipeline_keeps_several_micro_batches() -> None:
    one, several = row("single").memory, row("pp").memory
    assert one
    assert several
    assert one["activations"] == 50 + 8 * 10
    # Two in flight; and for each of the four a buffer of 4 rows of 64 tokens of 10 numbers from the other rank.
    assert several["activations"] == 50 + 5 * 10 * 2 + 4 * 4 * LENGTH * 10 * 4
    assert [in_flight(name, 4, 16) for name in ("gpipe", "1f1b", "zbv")] == [16, 4, 4]
    assert in_flight("interleaved", 4, 16) == (2 * 3 + 4 + 1) / 2
    assert in_flight("1f1b", 4, 2) == 2
    assert in_flight("interleaved", 4, 7) == 7


def test_the_bubble_is_that_of_the_schedule() -> None:
    assert row("ddp").bubble is None
    assert row("pp").bubble == pytest.approx(1 / 5)  # two ranks and four micro-batches
    assert row("pp_interleaved").bubble == pytest.approx(1 / 9)
    slow, fast = row("pp").seconds, row("pp_interleaved").seconds
    assert slow
    assert fast
    assert slow > fast


def test_memory_of_the_host_is_told_apart() -> None:
    found = row("zero3_offload", kind="gpu", memory=40 * GIB)
    assert found.host == 2000 + 2000 + 6000  # of each of two processes
    assert found.memory
    assert found.memory["weights"] == found.memory["optimizer"] == 0
    assert found.fits
    assert found.tokens_per_second is None
    assert "host memory" in str(found.reason)
    assert best_first([found, row("zero3", kind="gpu", memory=40 * GIB)])[0].strategy == "zero3"


def test_a_gpu_has_more_to_hold_than_the_model() -> None:
    around = (CUDA_GIB + NCCL_GIB) * GIB
    found = row("ddp", kind="gpu", memory=around)
    assert found.memory
    assert found.memory["overhead"] == around
    assert found.fits is False
    assert "1.5 GiB for 1.4 usable; most of it is overhead" in str(found.reason)
    assert row("ddp", kind="gpu", memory=2 * around).fits


def test_the_micro_batch_is_made_to_divide() -> None:
    hardware = Hardware("gpu", 8, GIB)
    _, fitted = candidate(load_strategy("ddp"), config(global_batch_size=16, per_device_train_batch_size=8), hardware)
    assert fitted.per_device_train_batch_size == 2
    # A pipeline of two ranks needs two micro-batches of what each of its four copies gets.
    _, fitted = candidate(load_strategy("pp"), config(global_batch_size=16, per_device_train_batch_size=8), hardware)
    assert fitted.per_device_train_batch_size == 2
    with pytest.raises(ConfigError, match=r"global_batch_size=12 does not divide"):
        candidate(load_strategy("ddp"), config(global_batch_size=12), hardware)
    with pytest.raises(ConfigError, match="num_processes=3"):
        candidate(load_strategy("tp"), config(), Hardware("gpu", 3, GIB))


def test_what_cannot_be_counted_is_no_fit() -> None:
    counted = copy.deepcopy(COUNTED)
    counted["cases"]["1:1:1:1:4"] |= {"layer": None, "fixed": None, "why": "shapes follow from numbers"}  # type: ignore[index]
    hardware = Hardware("cpu", 2, 1e9)
    found = plan_row(
        *candidate(load_strategy("ddp"), config(per_device_train_batch_size=4), hardware), counted, hardware
    )
    assert (found.fits, found.memory) == (None, None)
    assert "shapes follow from numbers" in str(found.reason)
    assert found.as_json()["memory_gib"] is None


def test_memory_of_the_host_has_an_end() -> None:
    strategy, options = load_strategy("zero3_offload"), {"global_batch_size": 16, "per_device_train_batch_size": 4}
    for host, fits in ((19_999, False), (20_000, True)):
        hardware = Hardware("gpu", 2, 40 * GIB, host=host)
        found = plan_row(*candidate(strategy, config(**options), hardware), COUNTED, hardware)
        assert found.fits is fits
        assert "host memory" in str(found.reason)


def test_optimizer_states_alone_can_rest_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    text = (ROOT / "accelerate_configs/zero3_offload.yaml").read_text()
    file.write_text(text.replace("offload_param_device: cpu", "offload_param_device: none"))
    found = row(str(file), kind="gpu", memory=40 * GIB)
    assert found.memory
    assert [found.memory[use] for use in ("weights", "gradients", "optimizer")] == [2000, 0, 0]
    assert found.host == 2000 + 6000


def test_weights_that_stay_gathered_are_sent_once() -> None:
    # 1,000 weights of which 200 outside; two micro-batches. Half is the other rank's, and gradients go half a way.
    again, once = row("fsdp1").sent, row("fsdp1_grad_op").sent
    assert again == 2 * 4 * (1000 + 1000 - 190 - 10 + 1000) / 2
    assert once == 2 * 4 * (1000 + 1000) / 2


def test_gradients_of_bf16_weights_are_half() -> None:
    small = {"master_weights": False, "mixed_precision": "bf16"}
    one, half = row("ddp").sent, row("ddp", **small).sent
    assert one == 2 * half == 4000  # type: ignore[operator]


def test_the_link_decides_the_order() -> None:
    slow, fast = (Hardware("gpu", 2, 80 * GIB, link=link) for link in (1e-6, 1e6))
    options = {"global_batch_size": 16, "per_device_train_batch_size": 4}
    found = [
        [plan_row(*candidate(load_strategy(name), config(**options), one), COUNTED, one) for name in ("tp", "pp")]
        for one in (slow, fast)
    ]
    assert [best_first(rows)[0].strategy for rows in found] == ["pp", "tp"]


def test_a_model_that_cannot_be_cut_is_no_candidate() -> None:
    settings = config()
    shape = load_shape(settings)
    assert "does not divide" in case(settings, shape, "1:1:3:1:1")["refused"]
    assert "use" in case(settings, shape, "3:1:1:1:1")["refused"]
    assert case(settings, shape, "1:1:1:64:1")["refused"].startswith("64 stages for")
    assert "refused" not in case(settings, shape, "2:1:1:2:1")
    counted = copy.deepcopy(COUNTED)
    counted["cases"]["2:1:1:1:4"] = {"refused": "3 heads"}  # type: ignore[index]
    hardware = Hardware("cpu", 2, 1e9)
    found = plan_row(
        *candidate(load_strategy("tp"), config(per_device_train_batch_size=4), hardware), counted, hardware
    )
    assert (found.fits, found.seconds, found.reason) == (None, None, "3 heads")


def test_the_best_comes_first() -> None:
    size = MeshSizes()
    slow, fast = Row("slow", size, fits=True, seconds=2.0), Row("fast", size, fits=True, seconds=1.0)
    large = Row("large", size, memory={"weights": 9.0}, fits=False, seconds=0.1)
    larger = Row("larger", size, memory={"weights": 10.0}, fits=False, seconds=0.1)
    rest, unknown = Row("refused", size, reason="no"), Row("unknown", size, seconds=0.1)
    names = [one.strategy for one in best_first([rest, larger, large, unknown, slow, fast])]
    assert names == ["fast", "slow", "unknown", "large", "larger", "refused"]


@pytest.mark.parametrize("text", ["0", "-1", "x", "nan", "inf", "1e99"])
def test_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size in GiB"):
        told_size(text, "gpu_memory", "GiB", 80)
    assert told_size("80", "gpu_memory", "GiB", 80) == 80


# -- the verb --------------------------------------------------------------------------------------------------------


def test_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["plan", "tiny-full", "--num_processes", "2", "--strategies", "ddp,pp,3d,single", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {one["strategy"]: one for one in found["rows"]}
    assert list(rows)[-1] == "3d"
    assert rows["3d"]["fits"] is None
    assert "num_processes=2" in rows["3d"]["reason"]
    assert rows["pp"]["sizes"]["pp"] == 2
    assert 0 < rows["pp"]["bubble"] < 1
    for name in ("ddp", "pp", "single"):
        memory = rows[name]["memory_gib"]
        assert memory.pop("total") == pytest.approx(sum(memory.values()))
        assert rows[name]["fits"]
        assert rows[name]["tokens_per_second"] > 0
    fastest = [one["tokens_per_second"] for one in found["rows"] if one["fits"]]
    assert fastest == sorted(fastest, reverse=True)
    assert found["parameters"] == sum(one.numel() for one in build_model(config()).parameters())
    assert found["devices"]["kind"] == "cpu"


def test_gpus_that_are_not_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Llama 3.1 8B, of which no more than config.json is at hand: fsdp2 holds it on eight GPUs, ddp does not."""
    facts = json.loads((ROOT / "tests/unit/architectures/llama-3.1-8b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(facts["config"]))
    words = ["llama-3.1-8b-full", "--model_name_or_path", str(tmp_path), "--num_processes", "8", "--gpu_memory", "80"]
    assert plan_verb([*words, "--strategies", "ddp,fsdp2,single"]) == 0
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith("best: --strategy fsdp2")
    assert "ddp: 126" in shown
    assert "most of it is optimizer, 59.8 GiB" in shown
    assert "8 GPUs of 80.0 GiB" in shown
    assert "8.03B parameters" in shown
    assert plan_verb([*words, "--strategies", "ddp,single"]) == 0
    assert "nothing fits: try" in capsys.readouterr().out
    assert plan_verb([*words, "--strategies", "megatron"]) == 0
    assert "no strategy could be reckoned" in capsys.readouterr().out


def test_the_advice_is_what_train_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The user's own file, by its path, and the micro-batch that divides."""
    file = tmp_path / "my own.yaml"
    file.write_text((ROOT / "accelerate_configs/ddp.yaml").read_text())
    words = ["tiny-full", "--num_processes", "8", "--gpu_memory", "80", "--global_batch_size", "16"]
    assert plan_verb([*words, "--strategies", str(file)]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == f"best: --strategy '{file}' --per_device_train_batch_size 2"


@pytest.mark.parametrize("kind", ["t5", "mamba", "gpt2"])
def test_other_kinds_of_models_are_told_of(kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    words = ["plan", "tiny-full", "--model_name_or_path", str(tmp_path), "--packing", "false", "--num_processes", "2"]
    status = run_verb([*words, "--strategies", "ddp,tp,pp", "--json"])
    told = capsys.readouterr()
    if kind != "gpt2":
        assert status == 2
        assert f"{kind} models cannot be planned" in told.err
        return
    rows = {one["strategy"]: one for one in json.loads(told.out)["rows"]}
    assert "no tensor-parallel plan" in rows["tp"]["reason"]
    assert "cannot be cut into pipeline stages" in rows["pp"]["reason"]
    assert rows["ddp"]["memory_gib"]["total"] > 0
    assert rows["ddp"]["tokens_per_second"] is None, "its matrices are no linear layers"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpu_memory", "lots"], "gpu_memory='lots' is no size in GiB"),
        (["--gpu_memory", "80", "--gpus", "0"], "gpus=0 with gpu_memory=80; write --num_processes"),
        (["--strategy", "ddp"], "write --strategies a,b,c"),
        (["--strategies", "ddp,nope"], "unknown strategy 'nope'"),
        (["--strategies", "ddp,ddp"], "two rows would be named ddp"),
        (["--num_machines", "2"], "a plan is for the GPUs of one machine"),
        (["--check"], "--check is for `tunesmith train`"),
        (["more"], "'more' stands alone"),
        (["--gpu_memry", "80"], "gpu_memory"),
        (["--link", "fast"], "link='fast' is no size in GB/s"),
        (["--mixed_precision", "fp16", "--num_processes", "1"], "mixed_precision=fp16 needs a GPU and there is none"),
        (["--learning_rate", "fast"], "learning_rate"),
        (["--model_name_or_path", "/nowhere"], "is no model folder"),
    ],
)
def test_a_wrong_request(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["plan", "tiny-full", *words]) == 2
    errors = capsys.readouterr().err
    assert told in errors
    assert "Traceback" not in errors


def test_the_help_names_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["plan", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--gpu_memory" in shown
    assert "--strategies" in shown
    assert "--per_device_train_batch_size" in shown


def test_the_program_says_what_is_wrong_with_the_model(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"model_name_or_path: {tmp_path}\ndataset_name: embedded\n")
    ended = subprocess.run(
        [sys.executable, "-m", "trainers.weigh", "--config", str(file)], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "has no config.json" in ended.stderr.partition("mistakes:\n")[2]
