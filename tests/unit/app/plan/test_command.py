"""`tunesmith plan` as a user types it: the table, the document, the advice, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli import run_verb
from app.launch.job import sort_words, train_job
from app.plan.command import plan_verb
from trainers.config.validation import build
from trainers.embedded import BASE_DIR
from trainers.model.load import build_model

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
    assert fastest == sorted(fastest, reverse=True)
    tiny = build({"model_name_or_path": "embedded", "dataset_name": "embedded", "method": "full"})
    assert found["parameters"] == sum(one.numel() for one in build_model(tiny).parameters())
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


def test_the_advice_is_what_train_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The user's own file, by its path, and the micro-batch that divides."""
    file = tmp_path / "my own.yaml"
    file.write_text((ROOT / "accelerate_configs/ddp.yaml").read_text())
    words = ["tiny-full", "--num_processes", "8", "--gpu_memory", "80", "--global_batch_size", "16"]
    assert plan_verb([*words, "--strategies", str(file)]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == f"best: --strategy '{file}' --per_device_train_batch_size 2"


def test_one_process_is_advised_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tiny-full", "--num_processes", "2"]
    assert plan_verb([*words, "--strategies", "single"]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == "best: --strategy single --num_processes 1"
    job = train_job(sort_words(["tiny-full", *told.removeprefix("best: ").split()]))
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
    assert told.splitlines()[-1] == "best: --strategy single"
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
        said = "are no causal language models" if kind == "t5" else "cannot be planned"
        assert f"{kind} models {said}" in told.err
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
        (["more"], "unexpected argument 'more'"),
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
    command = [sys.executable, "-m", "trainers.tools.memory_estimate", "--config", str(file)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "has no config.json" in ended.stderr.partition("mistakes:\n")[2]
