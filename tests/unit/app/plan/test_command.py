"""`tunesmith plan` as a user types it: the table, the document, the advice, and what it refuses."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import app.hardware
import app.plan.command
from app.cli import run_verb
from app.command_line import TRAIN
from app.hardware import Gpu
from app.launch.job import train_job
from app.launch.machines import MOST_MACHINES
from app.plan.command import _hardware, plan_verb
from app.plan.hardware import GIB
from app.plan.report import _ignored
from app.plan.scale import SHAPES, scale_config
from trainers.config.mistakes import ConfigError
from trainers.config.validation import build
from trainers.embedded import BASE_DIR
from trainers.model.load import build_model
from trainers.run import host_memory
from trainers.tools.memory_estimate import case, estimate_memory

pytestmark = pytest.mark.usefixtures("elsewhere")

ROOT = Path(__file__).resolve().parents[4]


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
    assert all(later <= 1.06 * earlier for earlier, later in itertools.pairwise(fastest))
    tiny = build({"model_name_or_path": "embedded", "dataset_name": "embedded", "method": "full"})
    assert found["parameters"] == sum(one.numel() for one in build_model(tiny).parameters())
    assert found["devices"]["kind"] == "cpu"


@pytest.mark.parametrize(
    ("without", "more"),
    [pytest.param([], ["--objective", "distill", "--teacher", "embedded"], marks=pytest.mark.long),
     (["--objective", "grpo", "--max_completion_length", "64"], ["--beta", "0.04"])],
)  # fmt: skip
def test_a_frozen_model_is_counted(without: list[str], more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*more: str) -> Any:
        flags = ["plan", "tiny-full", "--num_processes", "2", "--strategies", "ddp,fsdp2", "--json", *more]
        assert run_verb(flags) == 0
        return json.loads(capsys.readouterr().out)

    alone, taught = planned(*without), planned(*without, *more)
    assert (alone["teacher_parameters"], taught["teacher_parameters"]) == (0, taught["parameters"])
    first, second = ({row["strategy"]: row["memory_gib"] for row in document["rows"]} for document in (alone, taught))
    size = 4 * taught["parameters"] / GIB
    assert second["ddp"]["weights"] - first["ddp"]["weights"] == pytest.approx(size)
    assert second["fsdp2"]["weights"] - first["fsdp2"]["weights"] == pytest.approx(size / 2)
    assert second["ddp"]["optimizer"] == first["ddp"]["optimizer"]


def test_a_teacher_that_is_none_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_verb(["plan", "tiny-full", "--objective", "distill", "--teacher", str(tmp_path), "--json"]) == 2
    assert f"teacher={tmp_path} holds neither a run nor a model" in capsys.readouterr().err


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Hub that nobody answers for, and an empty cache."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_network")
def test_gpus_that_are_not_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Llama 3.1 8B, whose config ships with its presets: fsdp2 holds it on eight GPUs, ddp does not."""
    words = ["llama-3.1-8b-full", "--num_processes", "8", "--gpu_memory", "80"]
    assert plan_verb([*words, "--strategies", "ddp,fsdp2,single"]) == 0
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith("best: tunesmith train llama-3.1-8b-full --strategy fsdp2 --num_processes 8")
    assert "fsdp2 is first because it is the only one that fits" in shown
    assert "ddp: 156" in shown
    assert "most of it is optimizer, 59.8 GiB" in shown
    assert "8 GPUs of 80.0 GiB" in shown
    assert "8.03B parameters" in shown
    assert plan_verb([*words, "--strategies", "ddp,single"]) == 0
    assert "nothing fits, not even on 1024 GPUs of 80.0 GiB: try" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [], "nothing was fetched"


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("other", [["--model_name_or_path", "nobody/knows"], ["--model_revision", "other"]])
def test_a_config_that_does_not_ship_is_asked_of_the_hub(other: list[str]) -> None:
    """Control: without it the plan above would have failed."""
    words = ["llama-3.1-8b-full", *other, "--num_processes", "8", "--gpu_memory", "80", "--strategies", "ddp"]
    with pytest.raises(ConfigError, match="model_name_or_path="):
        plan_verb(words)


@pytest.mark.parametrize("balanced", [False, True])
def test_the_extra_pass_of_load_balancing_is_named_as_left_out(balanced: bool) -> None:
    """The embedded model has none; a mixture of experts whose config asks for the loss has."""
    config = build({"model_name_or_path": "embedded", "dataset_name": "embedded", "method": "full"})
    shape = AutoConfig.from_pretrained(BASE_DIR)
    if balanced:
        small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                 "num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 2}  # fmt: skip
        shape = AutoConfig.for_model("mixtral", **small, output_router_logits=True)
    counted = estimate_memory(config, shape, [], time_here=False)
    assert any("load balancing" in line for line in _ignored(config, counted)) is balanced


def test_the_advice_is_what_train_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The user's own file, by its path, and the micro-batch that divides."""
    file = tmp_path / "my own.yaml"
    file.write_text((ROOT / "accelerate_configs/ddp.yaml").read_text())
    words = ["tiny-full", "--num_processes", "8", "--gpu_memory", "80", "--global_batch_size", "16"]
    assert plan_verb([*words, "--strategies", str(file)]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    chosen = f"--strategy '{file}' --per_device_train_batch_size 2 --num_processes 8"
    assert told == f"best: tunesmith train tiny-full --global_batch_size 16 {chosen}"


def test_one_process_is_advised_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tiny-full", "--num_processes", "2"]
    assert plan_verb([*words, "--strategies", "single"]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == "best: tunesmith train tiny-full --strategy single --num_processes 1"
    job = train_job(TRAIN.read(shlex.split(told)[3:]))
    assert job.devices.num_processes == 1
    assert plan_verb([*words, "--strategies", "single", "--pp_size", "2"]) == 0
    assert "no strategy could be estimated" in capsys.readouterr().out


def test_weights_are_not_looked_at(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A model of which only a part has been downloaded so far."""
    (tmp_path / "config.json").write_text((BASE_DIR / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    words = ["tiny-full", "--model_name_or_path", str(tmp_path), "--num_processes", "1", "--strategies", "single"]
    assert plan_verb([*words, "--ddp_comm_hook", "fp16"]) == 0
    told = capsys.readouterr().out
    assert "--strategy single" in told.splitlines()[-1]
    assert "ddp_comm_hook is not estimated" in told


@pytest.mark.parametrize("kind", ["t5", "mamba", "gpt2"])
def test_other_kinds_of_models_are_told_of(kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    words = ["plan", "tiny-full", "--model_name_or_path", str(tmp_path), "--packing", "false", "--num_processes", "2"]
    status = run_verb([*words, "--strategies", "ddp,tp,pp", "--json"])
    told = capsys.readouterr()
    if kind != "gpt2":
        assert status == 2
        said = "are not causal language models" if kind == "t5" else "cannot be planned"
        assert f"{kind} models {said}" in told.err
        return
    rows = {one["strategy"]: one for one in json.loads(told.out)["rows"]}
    assert "no tensor-parallel plan" in rows["tp"]["reason"]
    assert "cannot be split into pipeline stages" in rows["pp"]["reason"]
    assert rows["ddp"]["memory_gib"]["total"] > 0
    assert rows["ddp"]["tokens_per_second"] is None, "its matrices are no linear layers"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpu_memory", "lots"], "gpu_memory='lots' is not a size in GiB"),
        (["--gpu_memory", "80", "--gpus", "0"], "gpus=0 with gpu_memory=80; use --num_processes"),
        (["--strategy", "ddp"], "use --strategies a,b,c"),
        (["--strategies", "ddp,nope"], "strategy='nope' is unknown"),
        (["--strategies", "ddp,ddp"], "two rows would be named ddp"),
        (["--main_process_ip", "host"], "a plan needs no addresses"),
        (["--check"], "--check is for `tunesmith train`"),
        (["more"], "unexpected argument 'more'"),
        (["--gpu_memry", "80"], "gpu_memory"),
        (["--link", "fast"], "link='fast' is not a size in GB/s"),
        (["--mixed_precision", "fp16", "--num_processes", "1"], "mixed_precision=fp16 needs a GPU, but there is none"),
        (["--learning_rate", "fast"], "learning_rate"),
        (["--price", "2", "--price", "3"], "--price is given twice"),
        (["--gpu_memory", "80", "--num_machines", "3", "--num_processes", "8"], "is not divisible by num_machines=3"),
        (["--gpu_memory", "80", "--num_processes", "1025"], "is not a whole number from 1 to 1024"),
        (["--gpu_memory", "80", "--machine_link", "9"], "machine_link=9: there is one machine"),
        *(
            (["--gpu_memory", "80", f"--{name}", value], f"{name}={value!r} is not a ")
            for name in ("price", "tflops", "machine_link", "num_machines", "num_processes", "tp_size", "link")
            for value in ("0", "-1", "NaN", "inf", "x", "9" * 30)
        ),
        (["--model_name_or_path", "/nowhere"], "is not a model folder"),
    ],
)
def test_a_wrong_request(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["plan", "tiny-full", *words]) == 2
    errors = capsys.readouterr().err
    assert told in errors
    assert "Traceback" not in errors


def test_the_scale_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["plan", "--table", "--json"]) == 0
    rows = {(row["model"], row["gpus"]): row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert len(rows) == 5 * 11
    for name, size in {"1B": 1.24e9, "7B": 6.74e9, "13B": 13.0e9, "70B": 70.6e9, "175B": 175e9}.items():
        assert rows[name, 1]["parameters"] == pytest.approx(size, rel=0.01)
        fits = [count for count in (2**power for power in range(11)) if rows[name, count]["fits"]]
        assert {rows[name, count]["needs"] for count in range(1, fits[0]) if (name, count) in rows} <= {fits[0]}
        assert len(fits) == 11 - fits[0].bit_length() + 1, "what fits on some GPUs fits on more"
        # Weights, gradients and Adam's states in fp32 alone are 16 bytes per parameter.
        assert fits[0] * 80 * 2**30 > 16 * size > fits[0] / 8 * 80 * 2**30
        for count in fits:
            row = rows[name, count]
            assert row["world_size"] == count
            assert row["memory_gib"]["total"] <= 0.92 * 80
            assert row["largest_micro_batch"] >= row["per_device_train_batch_size"]
    assert rows["7B", 1]["strategy"] is None
    assert rows["1B", 1]["strategy"] == "single"
    assert run_verb(["plan", "--table"]) == 0
    shown = capsys.readouterr().out
    assert "needs at least 2 GPUs" in shown
    assert "analytical" not in shown or "formula fitted to counted models" in shown


@pytest.mark.parametrize("words", [["tiny-full"], ["--gpus", "0"], ["--price", "2"], ["--learning_rate", "1"]])
def test_the_table_takes_nothing_that_it_would_ignore(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["plan", "--table", *words]) == 2
    assert "is not for --table" in capsys.readouterr().err


def test_the_formula_of_the_table_is_close_to_the_count() -> None:
    """The 7B of the table, counted with fake tensors as for a plan of one's own."""
    shape, settings = next(shape for shape in SHAPES if shape.name == "7B"), scale_config()
    llama = AutoConfig.for_model(
        "llama", hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads, intermediate_size=shape.inner, vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tied,
    )  # fmt: skip
    counted, formula = case(settings, llama, "1:1:1:1:1"), shape._case(1, 1)
    for name in ("parameters", "trained_inside", "trained_outside", "vectors"):
        assert formula[name] == counted[name]
    totals = [max(facts["fixed"] + shape.layers * facts["layer"], facts["later"]) for facts in (counted, formula)]
    assert totals[1] == pytest.approx(totals[0], rel=0.05)


@pytest.mark.parametrize("several", [False, True])
def test_gpus_that_strangers_use_are_named(
    several: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = [
        Gpu(index, f"GPU-{index}", "H100", 80 << 30, (index in (1, 3)[: 1 + several]) * (9 << 30)) for index in range(4)
    ]
    for module in (app.hardware, app.plan.command):
        monkeypatch.setattr(module, "find_gpus", lambda: gpus)
    monkeypatch.setattr(app.plan.command, "run_checker", lambda *_: json.dumps(SHAPES[0].counted()))
    assert plan_verb(["tiny-full", "--strategies", "ddp,single"]) == 0
    shown = capsys.readouterr().out
    left, them = ("GPUs 1, 3", "them") if several else ("GPU 1", "it")
    assert f"{left} left out: other programs use {them}; --gpus 0,1,2,3 plans with {them} anyway" in shown
    assert plan_verb(["tiny-full", "--strategies", "ddp", "--gpus", "0,1,2,3"]) == 0
    assert "left out" not in capsys.readouterr().out


def test_several_machines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command has what the launcher asks for; the price is that of all GPUs."""
    monkeypatch.setattr(app.plan.command, "run_checker", lambda *_: json.dumps(SHAPES[0].counted()))
    words = ["tiny-full", "--global_batch_size", "64", "--gpu_memory", "80", "--num_processes", "64", "--price", "2"]
    words += ["--strategies", "fsdp2,fsdp2_tp,3d,single", "--max_steps", "1000"]
    assert plan_verb([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["devices"]["machines"] == 8
    assert "25 GB/s (--link) inside a machine of 8 (--num_machines) and 12.5 GB/s to others" in document["assumed"]
    length = document["max_length"]
    assert document["tokens"] == 1000 * 64 * length
    for row in document["rows"]:
        assert row["hours"] == pytest.approx(document["tokens"] / row["tokens_per_second"] / 3600)
        assert row["cost"] == pytest.approx(2 * row["hours"] * row["world_size"])
        line = row["command"]
        assert ("--num_machines 8 --machine_rank" in line) == (row["world_size"] == 64)
        for name, value in {"RANK": "0", "MACHINE_0": "10.0.0.1", "SHARED_FOLDER": "shared"}.items():
            line = line.replace(f'"${name}"', value)
        job = train_job(TRAIN.read(shlex.split(line)[2:]))
        assert job.strategy.sizes.by_axis == row["sizes"]
    assert plan_verb([*words, "--num_machines", "4", "--machine_link", "100"]) == 0
    shown = capsys.readouterr().out
    assert "64 GPUs of 80.0 GiB in 4 machines" in shown
    assert "is first because" in shown
    assert "hours and cost are for the" in shown


@pytest.mark.parametrize(
    ("processes", "machines"), [(8, 1), (12, 2), (20, 4), (64, 8), (1020, None), (1024, MOST_MACHINES)]
)
def test_more_than_eight_gpus_are_in_machines_of_up_to_eight(processes: int, machines: int | None) -> None:
    values = {"num_processes": str(processes)}
    if machines is None:
        with pytest.raises(ConfigError, match="would be 170 machines of at most 8 GPUs; a run has at most 128"):
            _hardware(values, "80")
    else:
        assert _hardware(values, "80").machines == machines


def test_each_of_several_cpus_is_counted_with_its_own_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def counted(argv: object, env: dict[str, str], folder: object) -> str:
        threads.append(env["OMP_NUM_THREADS"])
        return json.dumps(SHAPES[0].counted())

    monkeypatch.setattr(app.plan.command, "run_checker", counted)
    monkeypatch.setattr(app.plan.command, "cpu_count", lambda: 8)
    hardware = _hardware({"num_processes": "4", "num_machines": "2"}, None)
    assert hardware.memory == pytest.approx(host_memory.total() / 2)
    assert app.plan.command.count(scale_config(), hardware, [])["timed_processes"] == 2
    assert threads == ["4"]


@pytest.mark.parametrize("words", [["--gpus", "0,2"], []])
def test_machines_use_the_gpus_that_were_chosen(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the user, or because other programs use the rest; without either the count says enough."""
    gpus = [Gpu(index, f"GPU-{index}", "H100", 80 << 30, 0) for index in range(3)]
    busy = [*gpus[:1], replace(gpus[1], used=9 << 30), gpus[2]]
    for shown, line in ((busy, "--gpus 0,2 --num_machines 2"), (gpus, "--num_processes 6 --num_machines 2")):
        for module in (app.hardware, app.plan.command):
            monkeypatch.setattr(module, "find_gpus", lambda shown=shown: shown)
        monkeypatch.setattr(app.plan.command, "run_checker", lambda *_: json.dumps(SHAPES[0].counted()))
        line = "--gpus 0,2 --num_machines 2" if words else line
        sizes = ["--global_batch_size", "12", "--per_device_train_batch_size", "1"]
        assert plan_verb(["tiny-full", *sizes, "--strategies", "ddp", "--num_machines", "2", *words]) == 0
        assert line in capsys.readouterr().out


def test_the_help_names_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["plan", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--gpu_memory" in shown
    assert "--strategies" in shown
    assert "--per_device_train_batch_size" in shown


def test_the_program_says_what_is_wrong_with_the_model(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"model_name_or_path: {tmp_path}\ndataset_name: embedded\n")
    command = [sys.executable, "-m", "trainers.tools.memory_estimate", "--config", str(file)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "has no config.json" in json.loads(ended.stdout)["mistakes"][0]["problem"]
