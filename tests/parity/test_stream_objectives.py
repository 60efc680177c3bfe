"""Objectives besides `sft` on a stream: the model that plain PyTorch trains, on any number of ranks, and resumed."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launching import Finished, launch, launch_well
from tests.parity import plain
from tests.parity.checks import equal_after_resume
from tests.parity.runs import HALF, config, curve, options, run
from tests.parity.test_distill import teacher
from tests.parity.test_grpo import grpo_options
from tests.parity.test_kto import kto_options, plain_kto, write_rows
from tests.parity.test_objectives import plain_dpo
from tests.shared import once
from trainers.embedded import PREFERENCES_DIR

ROWS_OF_A_SHARD, SHARDS = 12, 5
KTO_STEPS = 24  # until several of its divergences are above zero
OPTIONS: dict[str, dict[str, Any]] = {
    "dpo": {},
    "simpo": {},
    "cpo": {},
    "orpo": {},
    "reward": {},
    "kto": {"loss_type": "apo_zero_unpaired"},
    "distill": {},
    "grpo": {"num_generations": 2, "max_completion_length": 8, "steps_per_generation": 2},
}


def data(kind: str) -> str:
    """Preferences, labelled answers, chats or prompts, with a long field that nothing reads, so that few rows fill a
    shard."""

    def write(folder: Path) -> None:
        note = "x" * ((1 << 20) // (ROWS_OF_A_SHARD - 1))
        if kind == "labelled":
            write_rows(folder / "rows.jsonl")
            lines = (folder / "rows.jsonl").read_text().splitlines()
        else:
            lines = sorted((PREFERENCES_DIR / "train.jsonl").read_text().splitlines(), key=len)
        lines = lines[: ROWS_OF_A_SHARD * SHARDS]
        with (folder / "rows.jsonl").open("w") as file:
            for line in lines:
                row = json.loads(line)
                if kind == "distill":
                    row = {"messages": [*row["prompt"], *row["chosen"]]}
                elif kind == "grpo":
                    row = {"prompt": row["prompt"], "answer": row["chosen"][0]["content"]}
                file.write(json.dumps({**row, "note": note}) + "\n")

    return str(once(f"stream-{kind}", write) / "rows.jsonl")


def streamed(objective: str, **changes: Any) -> dict[str, Any]:
    """Options whose steps cross several windows, and the end of an epoch."""
    kind = objective if objective in ("distill", "grpo") else "pairs"
    own = {"teacher": str(teacher())} if objective == "distill" else {}
    if objective == "grpo":  # a reward that differs between answers, so that weights change
        own = {"reward_funcs": grpo_options()["reward_funcs"]}
    return {
        "objective": objective, "dataset_name": data(kind), "eval_dataset_name": "none", "max_eval_samples": None,
        "max_train_samples": None, "dataset_streaming": True, "streaming_window": 2 * ROWS_OF_A_SHARD,
        "max_length": 128, "overlong": "drop", "global_batch_size": 6, "per_device_train_batch_size": 1,
        "learning_rate": 2e-4, "packing": False, **own, **OPTIONS[objective], **changes,
    }  # fmt: skip


def trained(name: str, objective: str, **changes: Any) -> Finished:
    return run(1 if name == "single" else 2, "full", strategy=name, **streamed(objective, **changes))


@functools.cache
def plainly(window: int) -> plain.Curve:
    return plain_dpo(config("full", **streamed("dpo", streaming_window=window)))


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "single", "fsdp2", "zero3", "tp", "sp"])
def test_dpo_on_a_stream_trains_the_model_of_plain_pytorch(name: str) -> None:
    finished = trained(name, "dpo")
    assert curve(finished).agrees(plainly(2 * ROWS_OF_A_SHARD))
    assert finished.rows("loss")[-1]["epoch"] > 1, "the steps read the data more than once"
    if name == "ddp":
        assert not curve(finished).agrees(plainly(ROWS_OF_A_SHARD)), "control: another window"


@pytest.mark.long
def test_dpo_goes_on_bit_for_bit_and_no_further_than_its_reference(tmp_path: Path) -> None:
    undisturbed = trained("ddp", "dpo")
    again = options("full", **streamed("dpo"), resume_from_checkpoint=str(undisturbed.checkpoints[0]))
    assert equal_after_resume(undisturbed, launch_well(tmp_path / "run", 2, again, strategy="ddp"))


@pytest.mark.long
@pytest.mark.parametrize("objective", [name for name in OPTIONS if name != "dpo"])
def test_each_objective_is_the_same_on_one_rank_and_two_and_after_a_resume(objective: str, tmp_path: Path) -> None:
    two = trained("ddp", objective)
    if objective != "grpo":  # where a rounding flips a token, another answer is sampled
        assert curve(two).agrees(curve(trained("single", objective)))
        assert not curve(two).agrees(curve(trained("single", objective, streaming_window=ROWS_OF_A_SHARD))), "control"
    again = options("full", **streamed(objective), resume_from_checkpoint=str(two.checkpoints[0]))
    assert equal_after_resume(two, launch_well(tmp_path / "run", 2, again, strategy="ddp"))


def labelled(**changes: Any) -> dict[str, Any]:
    """KTO with its divergence, which windows of other pairs estimate in each epoch; rows hold several examples."""
    own = streamed("dpo", dataset_name=data("labelled"), global_batch_size=4)
    kept = {name: own[name] for name in own if name not in ("learning_rate", "max_length", "overlong", "packing")}
    return {**kto_options(), **kept, "objective": "kto", **changes}


@functools.cache
def plainly_kto(window: int) -> plain.Curve:
    return plain_kto(config("full", True, **labelled(streaming_window=window, max_steps=KTO_STEPS)))


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "single", "fsdp2", "zero3", "tp", "sp"])
def test_kto_with_its_divergence_on_a_stream_trains_the_model_of_plain_pytorch(name: str) -> None:
    finished = run(1 if name == "single" else 2, "full", True, name, **labelled(max_steps=KTO_STEPS))
    assert curve(finished).agrees(plainly_kto(2 * ROWS_OF_A_SHARD))
    assert finished.rows("loss")[-1]["epoch"] > 1, "windows pair their documents anew"
    assert sum(value > 0.02 for value in finished.series("kl")) > 2, "the clamp does not hide it"
    if name == "ddp":
        assert not curve(finished).agrees(plainly_kto(ROWS_OF_A_SHARD)), "control: another window"


@pytest.mark.long
def test_kto_with_its_divergence_on_a_stream_goes_on_bit_for_bit(tmp_path: Path) -> None:
    undisturbed = run(2, "full", True, "ddp", **labelled())
    again = options("full", True, **labelled(), resume_from_checkpoint=str(undisturbed.checkpoints[0]))
    assert equal_after_resume(undisturbed, launch_well(tmp_path / "run", 2, again, strategy="ddp"))


@pytest.mark.long
@pytest.mark.parametrize("mixed", [False, True])
def test_answers_that_were_recorded_on_a_stream_train_the_same(mixed: bool, tmp_path: Path) -> None:
    """On two ranks, and refused for a stream in other windows."""
    changes = {"dataset_name": "none", "dataset_streaming": False, "mix": prompts_mix()} if mixed else {}
    recorded = run(1, "full", **streamed("grpo", **changes))
    replay = {"recorded_answers": str(recorded.run.rollouts), **changes}
    assert curve(run(2, "full", strategy="ddp", **streamed("grpo", **replay))).agrees(curve(recorded))
    other = options("full", **streamed("grpo", **replay, seed=2))
    refused = launch(tmp_path / "other", 1, other)
    assert refused.status != 0
    assert "its answers are to other prompts" in refused.output, "control"


def prompts_mix() -> str:
    """Prompts as a stream, beside others that are held in full."""

    def write(folder: Path) -> None:
        sources = [{"dataset_name": data("grpo"), "name": name, "weight": weight, "streaming": name == "streamed"}
                   for name, weight in (("streamed", 3), ("held", 2))]  # fmt: skip
        (folder / "mix.yaml").write_text(yaml.safe_dump({"sources": sources}))

    return str(once("stream-mix-of-prompts", write) / "mix.yaml")


def mix() -> str:
    """The pairs as three streams: two of the same shards, and one of which no row is trained."""

    def write(folder: Path) -> None:
        sources = [
            {"dataset_name": data("pairs"), "name": name, "weight": weight, "streaming": True}
            for name, weight in (("often", 3), ("seldom", 1), ("never", 1e-4))
        ]
        (folder / "mix.yaml").write_text(yaml.safe_dump({"sources": sources}))

    return str(once("stream-mix-of-pairs", write) / "mix.yaml")


@pytest.mark.long
def test_a_stopped_run_on_a_mix_of_streams_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """The steps after the stop read windows that those before it do not; sources share what the checkpoint holds."""
    settings = options("full", **streamed("dpo", mix=mix(), dataset_name="none", dataset_streaming=False))
    undisturbed = launch_well(tmp_path / "undisturbed", 1, settings)
    stopped = launch(tmp_path / "stopped", 1, {**settings, "stop_at_step": HALF})
    again = {**settings, "resume_from_checkpoint": str(stopped.checkpoints[0])}
    assert equal_after_resume(undisturbed, launch_well(tmp_path / "run", 1, again))


@pytest.mark.long
def test_more_steps_than_there_are_references_of_are_refused(tmp_path: Path) -> None:
    few = streamed("dpo", max_steps=2, lr_scheduler_type="constant", save_steps=1)
    finished = launch_well(tmp_path / "run", 1, options("full", **few))
    further = {**few, "max_steps": 14, "resume_from_checkpoint": str(finished.checkpoints[0])}
    refused = launch(tmp_path / "further", 1, options("full", **further))
    assert refused.status != 0
    assert "has no log-probabilities under the initial model" in refused.output
