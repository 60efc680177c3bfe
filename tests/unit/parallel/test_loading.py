"""Each rank keeps its part of the very weights in the files, and neither reads nor holds much more to get there.

The ranks are real processes, which `loading_ranks.py` runs through `accelerate launch`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.launching import ROOT, environment
from tests.shared import once

MIB = 2**20
SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
"""134.5M weights, 513 MiB in fp32, of which the embedding is 108."""
STRATEGIES = [
    *[
        (2, name)
        for name in ("fsdp2", "tp", "pp", "ddp", "cp", "sp", "fsdp1", "fsdp1_grad_op", "zero1", "zero2", "zero3")
    ],
    *[(4, name) for name in ("hsdp", "fsdp2_tp", "pp_dp", "pp_fsdp2", "pp_interleaved", "zero2_tp")],
    *[(1, "single"), (8, "3d"), (8, "hsdp_tp")],
]
QUICK = {(2, "fsdp2"), (2, "tp"), (2, "pp")}
LORA_IN_CHECK = {(2, "zero3")}


def _marks(case: tuple[int, str], method: str) -> list[pytest.MarkDecorator]:
    """`make test` loads under three strategies, `make check` under one of each kind, `make unit` under all."""
    if (method == "full" and case in QUICK) or (method == "qlora" and case == (2, "fsdp2")):
        return []
    in_check = method == "lora" and case in LORA_IN_CHECK
    return [pytest.mark.slow] if in_check else [pytest.mark.slow, pytest.mark.long]


ON_LOAD = [
    pytest.param(*case, method, marks=_marks(case, method)) for case in STRATEGIES for method in ("full", "lora")
] + [
    pytest.param(*case, "qlora", marks=_marks(case, "qlora"))
    for case in ((1, "single"), (2, "ddp"), (2, "fsdp2"), (4, "hsdp"), (2, "zero2"), (2, "cp"))
]


def loaded(folder: Path, processes: int, strategy: str, alone: bool = False, **options: Any) -> list[dict[str, Any]]:
    """What each rank found; `alone`, without comparing it with the whole model."""
    chosen = {"model_name_or_path": "embedded", "dataset_name": "embedded", **options}
    file = ROOT / "accelerate_configs" / f"{strategy}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    command += ["--num_processes", str(processes), *(["--main_process_port", "0"] if processes > 1 else [])]
    command += [str(ROOT / "tests/unit/parallel/loading_ranks.py"), str(folder), json.dumps(chosen), strategy]
    command += ["alone"] if alone else []
    done = subprocess.run(
        command, env=environment(PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.parametrize(("processes", "strategy", "method"), ON_LOAD)
def test_what_a_rank_keeps_is_its_part_of_the_model(processes: int, strategy: str, method: str, tmp_path: Path) -> None:
    precision = "bf16" if method == "lora" else "no"
    found = loaded(tmp_path, processes, strategy, method=method, mixed_precision=precision)
    assert [rank["wrong"] for rank in found] == [[]] * processes
    names = set().union(*(rank["names"] for rank in found))
    assert set(found[0]["all"]) - names <= {"lm_head.weight", "base_model.model.lm_head.weight"}  # tied
    assert len(names) > 30


def large(folder: Path) -> None:
    """A random model of 134.5M weights, stored in bf16."""
    torch.manual_seed(0)
    shape = AutoConfig.for_model("llama", **SHAPE)
    AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(folder)


@pytest.mark.parametrize(
    ("processes", "strategy", "method", "read"),
    [
        (2, "fsdp2", "full", 128),
        pytest.param(4, "hsdp", "full", 128, marks=pytest.mark.long),
        pytest.param(4, "fsdp2", "lora", 64, marks=pytest.mark.long),
        pytest.param(2, "tp", "full", 156, marks=pytest.mark.long),  # a matrix cut by columns is read whole
        pytest.param(2, "ddp", "full", 257, marks=pytest.mark.long),
        pytest.param(2, "fsdp1", "full", 257, marks=pytest.mark.long),
        pytest.param(2, "zero3", "full", 257, marks=pytest.mark.long),
    ],
)
def test_memory_and_reading_are_bounded(processes: int, strategy: str, method: str, read: int, tmp_path: Path) -> None:
    """RssAnon up to the last weight: what is kept, the largest tensor and 0.5 GiB; 64 MiB where weights are cut first.

    Under fsdp2, 64 MiB is a bound that loading all of the model would break: 513 for 257 + 108 + 64.
    """
    model = once("model-134m", large)
    found = loaded(tmp_path, processes, strategy, model_name_or_path=str(model), method=method)
    slack = 512 if strategy in ("fsdp1", "zero3") else 64
    for rank in found:
        assert rank["wrong"] == []
        assert rank["peak"] <= rank["kept"] + (108 + slack) * MIB
    # The code of libraries that are imported meanwhile is read too.
    assert max(rank["read"] for rank in found) <= (read + 40) * MIB
    assert strategy == "zero3" or min(rank["read"] for rank in found) >= (read - 1) * MIB
