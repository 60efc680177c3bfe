"""The mesh sizes of the command line: into the strategy's file, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.command_line import TRAIN, Args, Verb
from app.launch.job import train_job
from app.prove.plan import PROVE, make_plan
from trainers.config.mistakes import ConfigError
from trainers.config.options import MESH_OPTIONS, TrainConfig
from trainers.strategy.mesh import BACKENDS
from trainers.strategy.mesh_options import read_sizes, with_sizes
from trainers.strategy.strategy import load_strategy, resolve, strategy_names

pytestmark = pytest.mark.usefixtures("elsewhere")


def args(*words: str, verb: Verb = TRAIN) -> Args:
    found = verb.read(["tiny-full", *words])
    assert found
    return found


def test_they_are_no_options_of_the_config() -> None:
    """The Accelerate file alone says the strategy."""
    assert not set(MESH_OPTIONS) & set(TrainConfig.model_fields)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("--strategy tp --tp_size 4 --num_processes 8", {"dp_replicate": 2, "tp": 4}),
        ("--tp_size 2 --num_processes 2", {"tp": 2}),
        ("--strategy fsdp2 --tp_size 2 --num_processes 8", {"dp_shard": 4, "tp": 2}),
        ("--strategy hsdp --dp_replicate_size 4 --num_processes 8", {"dp_replicate": 4, "dp_shard": 2}),
        ("--strategy hsdp --dp_replicate_size 1 --num_processes 8", {"dp_shard": 8}),
        ("--strategy 3d --tp_size 4 --pp_size 2 --num_processes 16", {"pp": 2, "dp_shard": 2, "tp": 4}),
        ("--strategy sp --sp_size 4 --num_processes 8", {"dp_shard": 2, "sp": 4}),
        ("--strategy zero2 --cp_size 2 --num_processes 4", {"dp_shard": 2, "cp": 2}),
        ("--strategy ddp --dp_replicate_size 4 --num_processes 4", {"dp_replicate": 4}),
        ("--strategy ep --ep_size 4 --num_processes 8", {"dp_replicate": 8}),
        ("--strategy single --tp_size 1 --ep_size 1", {}),
    ],
)
def test_the_file_of_the_run_has_the_sizes(words: str, sizes: dict[str, int], tmp_path: Path) -> None:
    job = train_job(args(*words.split(), "--per_device_train_batch_size", "1"))
    assert {axis: size for axis, size in job.strategy.sizes.by_axis.items() if size > 1} == sizes
    # What a resumed run, and a launch by hand, read.
    file = tmp_path / "accelerate.yaml"
    file.write_text(job.strategy.dump())
    kept = load_strategy(str(file))
    assert kept.sizes == job.strategy.sizes
    assert kept.sizes.ep == (4 if "--ep_size 4" in words else 1)
    assert resolve(kept, kept.num_processes, "no").sizes == job.strategy.sizes


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--strategy single --tp_size 2", "tp_size=2 cannot be combined with distributed_type=NO"),
        ("--strategy zero2 --dp_replicate_size 2 --num_processes 4",
         "dp_replicate_size=2 cannot be combined with distributed_type=DEEPSPEED"),
        ("--strategy fsdp2 --cp_size 2 --sp_size 2 --num_processes 8", "cp and sp both split the rows"),
        ("--strategy tp --tp_size 3 --num_processes 8",
         "num_processes=8 / tp 3 leaves 2; use a multiple of 3, or other sizes with --tp_size"),
        ("--strategy fsdp2 --tp_size 2 --num_processes 2", "nothing to shard over; use at least 4"),
        ("--strategy fsdp1 --tp_size 2 --num_processes 4", "needs fsdp_version: 2"),
        ("--strategy ddp --dp_replicate_size 2 --num_processes 4", "num_processes=4 makes it dp_replicate 4"),
        ("--strategy ep --num_processes 3", "ep_size=2 does not divide the 3 processes; use a multiple of 2"),
        ("--strategy ep --tp_size 2 --num_processes 4", "ep_size=2 cannot be combined with tp=2; use one of them"),
        ("--strategy ep --pp_size 2 --num_processes 4", "ep_size=2 cannot be combined with pp=2; use one of them"),
        ("--strategy fsdp2 --ep_size 2 --num_processes 2", "ep_size=2 cannot be combined with distributed_type=FSDP"),
        ("--strategy zero2 --ep_size 2 --num_processes 2", "ep_size=2 cannot be combined with distributed_type=DEEPS"),
        ("--ep_size 2 --num_processes 1", "ep_size=2 cannot be combined with distributed_type=NO"),
        ("--strategy ep --num_processes 2 --method qlora", "4-bit layers are not split so; use method=lora"),
        ("--strategy ep --num_processes 2 --mixed_precision fp16", "mixed_precision=fp16 needs loss scaling"),
        ("--strategy ep --num_processes 2 --torch_compile true", "torch_compile=true is not verified"),
        ("--strategy ep --num_processes 2 --ddp_comm_hook bf16", "whose weights differ under tp, pp and ep"),
        *((f"--{name} {value}", f"{name}={value!r} is not a whole number from 1 to")
          for name in MESH_OPTIONS for value in ("0", "-1", "two", "NaN", "inf", "2.0", "9" * 30, "1_0", "²")),
    ],
)  # fmt: skip
def test_what_the_backend_cannot_do_is_refused(words: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        train_job(args(*words.split()))
    assert text in str(refused.value)


def test_all_are_read_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        read_sizes({"tp_size": "x", "cp_size": "y", "gpus": "z"})
    assert [mistake.option for mistake in refused.value.mistakes] == ["tp_size", "cp_size"]


@pytest.mark.parametrize("name", strategy_names())
@pytest.mark.parametrize("axis", ["tp", "cp", "sp", "dp_replicate"])
def test_an_axis_is_taken_exactly_where_the_backend_has_it(name: str, axis: str) -> None:
    strategy = load_strategy(name)
    other = {"cp": "sp", "sp": "cp"}.get(axis)
    fits = axis in BACKENDS[strategy.distributed_type] and strategy.mesh.get(str(other), 1) == 1
    if fits:
        assert with_sizes(strategy, {axis: 4}).mesh[axis] == 4
    else:
        with pytest.raises(ConfigError):
            with_sizes(strategy, {axis: 4})


def test_a_proof_takes_them_for_every_row_that_can(tmp_path: Path) -> None:
    words = ("--strategies", "single,ddp,zero1,tp", "--tp_size", "2", "--num_processes", "4")
    rows = {row.strategy: row for row in make_plan(args(*words, "--output_dir", str(tmp_path), verb=PROVE)).rows}
    assert {name: row.job.strategy.sizes.tp for name, row in rows.items() if row.job} == {"ddp": 2, "zero1": 2, "tp": 2}
    assert "tp_size=2 cannot be combined" in str(rows["single"].reason)
