"""The benchmarks run, and hold equal work against equal work; what they measure is for docs/LOG.md."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.plan.estimate import Row
from benchmarks import data, gpu, plan, start, throughput
from benchmarks.contenders import Bench, Case, Measured, RunFailed, cause_of
from benchmarks.gpu_proof import PASSED
from benchmarks.rows import Batches, batches_of, write_chat
from tests import forked
from tests.launching import ROOT
from trainers.config.options import TrainConfig
from trainers.embedded import BASE_DIR


@pytest.mark.long
def test_all_contenders_do_equal_work(tmp_path: Path) -> None:
    """Tunesmith, a bare loop and TRL have the same losses on the same rows, packed ones apart."""
    bench = Bench(tmp_path)
    for packing in (False, True):
        case = Case("embedded", packing, 1, warm=1, timed=2, global_batch=4, micro=2)
        found = throughput.measure(bench, case, 1, throughput.tools(case))
        assert set(found["tools"]) == ({"tunesmith", "bare"} if packing else {"tunesmith", "bare", "trl"})
        assert all(run["tokens_per_second"] > 0 and run["peak_mib"] > 100 for run in found["tools"].values())
        losses = [run["last_loss"] for run in found["tools"].values()]
        assert max(losses) - min(losses) < 1e-4 * losses[0]


def test_other_work_is_no_comparison() -> None:
    case = Case("embedded", False, 1, warm=1, timed=2)
    own = Measured(100.0, 500.0, first_loss=3.0, last_loss=2.0)
    throughput.check_equal_work(case, {"tunesmith": own, "bare": replace(own, last_loss=2.00001)})
    with pytest.raises(RunFailed, match=r"bare has loss 2\.001000 where tunesmith has 2\.000000"):
        throughput.check_equal_work(case, {"tunesmith": own, "bare": replace(own, last_loss=2.001)})


def test_the_batches_are_those_of_training(tmp_path: Path) -> None:
    rows = write_chat(tmp_path / "rows.jsonl", 60, seed=3)
    config = TrainConfig(model_name_or_path="embedded", dataset_name=str(rows), max_length=256, global_batch_size=4,
                         max_steps=3, cache_dir=str(tmp_path / "cache"))  # fmt: skip
    made = batches_of(config)
    made.save(tmp_path / "batches.npz")
    found = Batches.load(tmp_path / "batches.npz")
    assert len(found.offsets) == 3 * 4 + 1
    assert found.tokens(0, 3) == len(found.ids) == found.tokens(0, 1) + found.tokens(1, 3)
    documents = []
    for number in range(12):
        ids, trained, places = found.row(number)
        assert 0 < len(ids) <= 256
        starts = np.flatnonzero(places == 0)
        assert starts[0] == 0
        assert not trained[starts].any(), "the first token of a document is predicted by nothing"
        documents.append(len(starts))
    assert max(documents) > 1, "packed rows hold several"


@pytest.mark.long
def test_the_data_benchmark_measures(tmp_path: Path) -> None:
    rows = write_chat(tmp_path / "rows.jsonl", 200, seed=3)
    first, again = (data.measured(rows, tmp_path / "cache", workers=1) for _ in range(2))
    assert first["rows"] == again["rows"] == 200
    assert first["prepare_s"] > again["prepare_s"], "the second finds it in the cache"
    assert first["peak_mib"] > 50


@pytest.mark.long
def test_the_gpu_benchmark_runs_without_one(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """On narrow layers: equal work by two contenders, and a case that cannot run here."""
    gpu.main(["--tiny", "--only", "8b, lora, packed, bf16, 1", "fp8", "--out", str(tmp_path), "--json"])
    shown = json.loads(capsys.readouterr().out)
    found = {one["name"]: one["tools"] for one in shown["cases"]}
    lora = found["tiny-llama-3.1-8b, lora, packed, bf16, 1 process(es)"]
    assert set(lora) == {"tunesmith", "bare"}
    assert all(run["tokens_per_second"] > 0 and run["peak_mib"] > 100 for run in lora.values())
    assert "mixed_precision=fp8 needs" in found["tiny-qwen3-1.7b, packed, fp8, 1 process(es)"]["tunesmith"]["failed"]
    (written,) = tmp_path.glob("20*-*.md")
    assert "| bare |" in written.read_text()


def test_the_gpu_benchmark_ends_in_time(capsys: pytest.CaptureFixture) -> None:
    gpu.main(["--tiny", "--only", "llama", "--budget", "0"])
    shown = capsys.readouterr().out
    assert shown.count("not measured: no time left") == len(re.findall(r"^\| tiny-", shown, re.MULTILINE)) > 0


@pytest.mark.long
def test_the_proof_on_a_gpu_runs_in_small(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_proof", "--tiny", "--out", str(tmp_path), "--budget", "300"]
    done = forked.run(command, cwd=ROOT, capture_output=True, text=True, timeout=320)
    (file,) = tmp_path.iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-gpu\.json", file.name)
    result = json.loads(file.read_text())
    outcomes = {part["name"]: (part["outcome"], part["reason"]) for part in result["parts"]}
    assert outcomes == dict.fromkeys(("tests", "prove", "memory", "rates"), (PASSED, None)), done.stdout + done.stderr
    assert done.returncode == 0
    assert result["complete"]
    assert result["device"].startswith("CPU")
    tests, prove, memory, rates = (part["results"] for part in result["parts"])
    by_name = {test["name"].partition("::")[2]: test for test in tests["tests"]}
    assert by_name["test_a_deterministic_rerun_is_the_same_bit_for_bit"]["outcome"] == PASSED
    assert by_name["test_fp16_trains_with_its_scaler"]["reason"] == "needs a GPU"
    assert "test_fp16_trains_with_its_scaler not run: needs a GPU" in done.stdout
    assert [(row["strategy"], row["bit_equal_steps"]) for row in prove["rows"]] == [("single", 2)]
    assert prove["tolerance"]["loss"] > 1e-5
    assert memory["rows"][0]["ratio"] > 0
    assert set(rates["cases"][0]["tools"]) == {"tunesmith", "bare"}


@pytest.mark.long
def test_the_runs_of_the_gpu_tests_pass_where_a_cpu_can(tmp_path: Path) -> None:
    """A mistake in a test that needs a GPU is seen before there is one."""
    plain = ["-o", "addopts=", "-q", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--on_cpu", *plain]
    results = tmp_path / "results.json"
    done = forked.run([*command, "--results", str(results)], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout
    outcomes = [test["outcome"] for test in json.loads(results.read_text())["tests"]]
    assert outcomes.count("passed") == 6


@pytest.mark.parametrize(
    ("printed", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "out of memory"),
        ("  import trl\nModuleNotFoundError: No module named 'trl'\n", "needs trl, which is not installed"),
        ("ValueError: no\nTraceback (most recent call last):\nsubprocess.CalledProcessError: Command", "exit status 1: "
         "ValueError: no"),
        ("x=1; use y\nTraceback (most recent call last):\nsubprocess.CalledProcessError: Command", "exit status 1: "
         "x=1; use y"),
        ("", "exit status 1: it printed nothing"),
    ],
)  # fmt: skip
def test_a_failed_run_is_told_in_one_line(printed: str, cause: str) -> None:
    assert cause_of(printed, 1) == cause


def test_flops_are_those_of_the_real_matrices(tmp_path: Path) -> None:
    """Two layers, hidden size 64, heads 4 and 2 of 16, intermediate 128, vocabulary 2,048, untied head; r=16."""
    case = Case("tiny-llama-3.1-8b", True, 1, warm=1, timed=1, micro=1, global_batch=2, max_length=64)
    bench = Bench(tmp_path)
    batches = Batches.load(bench.batches(case))
    attention = 6 * 2 * 64 * batches.squared_lengths(1, 2) / batches.tokens(1, 2)
    base = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 64 * 2048
    adapters = 2 * 16 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    assert gpu.flops_per_token(bench, case) == pytest.approx(6 * base + attention)
    lora = replace(case, method="lora")
    assert gpu.flops_per_token(bench, lora) == pytest.approx(4 * base + 6 * adapters + attention)


def test_attention_is_counted_over_documents() -> None:
    """Two steps of two rows, the first of which holds documents of 3 and 2 tokens."""
    places = np.array([0, 1, 2, 0, 1, 0, 1, 0, 0, 1, 2, 3])
    made = Batches(places, places > 0, places, np.array([0, 5, 7, 8, 12]), global_batch_size=2)
    assert made.squared_lengths(0, 1) == 9 + 4 + 4
    assert made.squared_lengths(1, 2) == 1 + 16


@pytest.mark.long
def test_a_start_is_told_by_phase(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    case = start.first_step(1)
    own, theirs = start.tunesmith(bench, case, cold=True), start.bare(bench, case)
    assert list(own) == ["command", "check", "launcher", "imports", "data", "processes", "model", "wrap", "first step",
                         "total"]  # fmt: skip
    total = own.pop("total")
    assert sum(own.values()) == pytest.approx(total)
    assert all(seconds >= 0 for seconds in own.values())
    assert theirs["total"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_a_rank_has_what_was_planned(name: str, tmp_path: Path) -> None:
    """What a rank keeps from step to step is allocated, and the plan is not far from what is resident."""
    options = {
        **plan.OPTIONS, "model_name_or_path": str(BASE_DIR), "max_length": 64, "packing": False,
        "global_batch_size": 4, "per_device_train_batch_size": 2,
    }  # fmt: skip
    (planned, other), process_bytes = plan.plan([name, "fsdp2" if name == "ddp" else "ddp"], options)
    measured = plan.measure(tmp_path / name, planned, options)
    resident, allocated = measured["train"]

    def kept(row: Row) -> float:
        # DDP's buckets keep the gradients.
        memory = row.memory or {}
        return memory["weights"] + memory["optimizer"] + (memory["gradients"] if row.strategy == "ddp" else 0)

    assert allocated > 0.9 * kept(planned) > 4_000_000
    assert measured["rest"][1] == pytest.approx(kept(planned), abs=400_000)
    assert measured["rest"][1] != pytest.approx(kept(other), abs=400_000), "control"
    assert 0.4 * resident < planned.total - process_bytes < 1.1 * resident
