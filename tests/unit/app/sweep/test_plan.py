"""The command line of a sweep: every trial is checked before the first starts, and all mistakes come at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.hardware import Gpu
from app.sweep import plan
from app.sweep.plan import SWEEP, Plan, make_plan
from trainers.config.fields import fields
from trainers.config.mistakes import ConfigError

PRESET = ("tiny-lora", "--num_processes", "1")


def planned(*words: str) -> Plan:
    args = SWEEP.read([*PRESET, *words])
    assert args is not None
    return make_plan(args)


def refused(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        planned(*words)
    return caught.value.lines


def test_every_combination_and_seed_is_a_run_beside_the_sweep(tmp_path: Path) -> None:
    made = planned("--learning_rate", "1e-4,3e-4,1e-3", "--lora_r", "8,16", "--seeds", "3", "--runs_dir", str(tmp_path))
    assert len(made.record.trials) == 6
    assert made.record.seeds == [42, 43, 44]
    names = [run.id for trial in made.record.trials for run in trial.runs]
    assert len(set(names)) == 18
    assert {made.folder.run(run).path.parent for trial in made.record.trials for run in trial.runs} == {tmp_path}
    assert made.record.measure == "last_eval_loss"
    assert list(tmp_path.iterdir()) == []
    assert planned("--lora_r", "8,16", "--eval_dataset_name", "none").record.measure == "recent_loss"
    assert planned("--seed", "7", "--seeds", "2").record.seeds == [7, 8]


def test_all_mistakes_come_at_once() -> None:
    lines = refused(
        "--learning_rate", "1e-4,30", "--lora_alpha", "0,-1", "--lora_r", "8,,16", "--seeds", "0", "--measure", "mood",
        "--search", "guess", "--halving", "1", "--output_dir", "here",
    )  # fmt: skip
    for start in ("learning_rate='30'", "lora_alpha='0'", "lora_alpha='-1'", "lora_r=8,,16", "seeds='0'",
                  "measure='mood'", "search='guess'", "halving='1'", "output_dir=here"):  # fmt: skip
        assert any(line.startswith(start) for line in lines), start
    assert all("; " in line for line in lines), "each says the way out"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--learning_rate", "1e-4,0.0001"], "learning_rate=0.0001 is the same value as 1e-4"),
        (["--learning_rate", "1e-4:1e-3"], "is a range, and a grid takes values"),
        (["--learning_rate", "1e-4:20", "--search", "tpe", "--trials", "3"], "learning_rate='20' is refused"),
        (["--learning_rate", "1e-4:1e-3", "--search", "random"], "needs a number of trials"),
        (["--lora_r", "8,16", "--search", "random", "--trials", "3"], "there are 2 combinations"),
        (["--lora_r", "8,16", "--trials", "2"], "with a grid"),
        (["--seeds", "201"], "from 1 to 100"),
        (["--lora_r", ",".join(map(str, range(1, 72))), "--seeds", "3"], "213 runs are more than 200"),
        (["--lora_r", "8,16", "--seeds", "3", "--max_runs", "5"], "--max_runs 6"),
        ([], "no option has several values"),
        (["--lora_r", "8,16", "--halving", "2"], "needs the number of steps"),
        (["--max_steps", "50,100", "--halving", "2"], "with several values of max_steps"),
        (["--lora_r", "8,16", "--halving", "2", "--max_steps", "1"], "raise --max_steps"),
        (["--lora_r", "4:8", "--search", "tpe", "--trials", "3", "--halving", "2", "--max_steps", "9"], "with TPE"),
        (["--lora_r", "8,16", "--eval_dataset_name", "none", "--measure", "best_eval_loss"], "without evaluation data"),
        (["--lora_r", "8,16", "--measure", "step"], "is not a measure"),
        (["--lora_r", "8,16", "--gpus_per_run", "1"], "does not divide 0 GPUs"),
        (["--lora_r", "8,16", "--num_machines", "2"], "num_machines=2 is not for sweeps"),
        (["--lora_r", "8,16", "--min_machines", "2"], "min_machines=2 is not for sweeps"),
        (["--lora_r", "8,16", "--halving", "2", "--max_steps", "1"], "would cut 1 time, first"),
        (["--lora_r", "8,16", "--on", "ray"], "on=ray is not for sweeps: Ray has no queue"),
        (["--lora_r", "8,16", "--on", "kubernetes"], "on=kubernetes is not for sweeps: Tunesmith starts nothing there"),
        (["--lora_r", "8,16", "--on", "moon"], "on=moon is not for sweeps: it is no place to train"),
        (["--lora_r", "8,16", "--partition", "gpu"], "partition=gpu is for jobs of SLURM; add --on slurm"),
        (["--lora_r", "8,16", "--on", "slurm", "--time", "soon"], "time=soon is not a time limit"),
        (
            ["--lora_r", "8,16", "--on", "slurm", "--slurm_extra", "mem=0"],
            "site.yaml, which is read at each submission",
        ),
        (["--lora_r", "8,16", "--on", "slurm", "--gpus_per_run", "1"], "write --gpus_per_node"),
        (["--lora_r", "8,16", "--on", "slurm", "--gpus", "0"], "gpus=0 is decided by SLURM"),
        (["--lora_r", "8,16", "--force"], "is for `resume`"),
        (["--lora_r", "8,16", "--seeds", "2", "--seed", "4294967295"], "seed='4294967296' is refused"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(words: list[str], problem: str) -> None:
    assert problem in "\n".join(refused(*words))


def test_many_runs_are_said_to_be_meant() -> None:
    words = ["--lora_r", ",".join(map(str, range(1, 72))), "--seeds", "3", "--max_runs", "213"]
    assert len(planned(*words).record.trials) == 71


def test_random_trials_are_known_from_the_start_and_the_same_each_time() -> None:
    words = ["--learning_rate", "1e-5:1e-2:log", "--search", "random", "--trials", "6"]
    first, second = (planned(*words).record.trials for _ in range(2))
    assert [trial.values for trial in first] == [trial.values for trial in second]
    assert len({trial.values["learning_rate"] for trial in first}) == 6


def test_gpus_are_split_among_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(index, f"uuid-{index}", "GPU", 80 * 2**30) for index in range(4)]
    for module in ("app.sweep.plan", "app.hardware"):
        monkeypatch.setattr(f"{module}.find_gpus", lambda: gpus)
    args = SWEEP.read(["tiny-lora", "--lora_r", "8,16", "--gpus_per_run", "2"])
    assert args is not None
    record = make_plan(args).record
    assert (record.devices, record.parallel) == ([{"gpus": "0,1"}, {"gpus": "2,3"}], 2)
    args = SWEEP.read(["tiny-lora", "--lora_r", "8,16", "--gpus", "1,2,3", "--gpus_per_run", "1"])
    assert args is not None
    record = make_plan(args).record
    assert ([entry["gpus"] for entry in record.devices], record.launch) == (["1", "2", "3"], {})


def test_paths_are_made_absolute_as_a_sweep_may_go_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "mine.yaml").write_text("dataset_name: my.jsonl\n")
    for words in (["--dataset_name", "my.jsonl"], ["--config", "mine.yaml"]):
        record = planned(*words, "--lora_r", "8,16").record
        assert record.options["dataset_name"] == str(tmp_path / "my.jsonl")
    values = planned("--dataset_name", "embedded|my.jsonl").record.axes[0].values
    assert values == ("embedded", str(tmp_path / "my.jsonl"))
    assert record.options["runs_dir"] == str(tmp_path / "runs")


WORDS = st.sampled_from(
    [
        "1",
        "8,16",
        "1e-4,1e-3",
        "1:2",
        "1e-5:1e-3:log",
        "true,false",
        "a|b",
        "none",
        "",
        "-1",
        "\x00",
        "~0",
        "~0|b",
        "[",
        "x" * 300,
    ]
)
NAMES = sorted({field.name for field in fields()} | {"search", "trials", "seeds", "parallel", "halving", "measure"})
REQUESTS = st.lists(st.tuples(st.sampled_from(NAMES), st.one_of(WORDS, st.text(max_size=8))), min_size=1, max_size=3)


def plans_or_refuses(make: Any, request: list[tuple[str, str]]) -> None:
    """Any values make a sweep, or are refused with a line for each mistake; nothing else is raised."""
    words = [f"--{name}={value}" for name, value in dict(request).items()]
    try:
        args = SWEEP.read([*PRESET, *words])
        made = make(args)
    except ConfigError as error:
        refusal = error.lines
    else:
        assert 1 <= made.record.trial_count <= 200
        return
    assert refusal
    assert all(line.strip() for line in refusal)


@settings(max_examples=60, deadline=None)
@given(REQUESTS)
def test_any_values_make_a_sweep_or_are_refused(request: list[tuple[str, str]]) -> None:
    plans_or_refuses(make_plan, request)


def test_an_error_of_ours_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: values that are not checked reach code that cannot use them."""
    monkeypatch.setattr(plan, "whole_number", lambda text, least, most: int(text))
    with pytest.raises(ValueError, match="invalid literal"):
        plans_or_refuses(make_plan, [("lora_r", "8,16"), ("seeds", "x")])
