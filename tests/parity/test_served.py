"""GRPO with a server that samples: the same training as by the ranks, and what is wrong with a server ends the run.

The server is a stand-in with vLLM's interface (`tests/sampling_server.py`).
"""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.detached import tunesmith
from tests.launching import Finished, flags, free_port, launch, launch_well
from tests.parity.runs import mostly_long
from tests.sampling_server import serving
from tests.shared import once
from trainers.config.sampler import API_KEY
from trainers.embedded import BASE_DIR
from trainers.served import OTHER_WEIGHTS
from trainers.strategy.strategy import load_strategy

STEPS, GROUP, PROMPTS = 4, 3, 2
KEY = "key-of-the-sampling-server"
REWARD = "def variety(completions):\n    return [len(set(text)) / 50 for text in completions]\n"


def options(**changes: Any) -> dict[str, Any]:
    """Of a short run whose adapter changes much at each step."""
    reward = once("served-reward", lambda folder: (folder / "reward.py").write_text(REWARD) and None) / "reward.py"
    return {
        "model_name_or_path": "embedded", "dataset_name": "embedded", "eval_dataset_name": "embedded",
        "max_eval_samples": 3, "max_train_samples": 21, "max_length": 192, "max_steps": STEPS, "logging_steps": 1,
        "objective": "grpo", "method": "lora", "lora_r": 4, "learning_rate": 5e-3, "reward_funcs": f"{reward}:variety",
        "num_generations": GROUP, "max_completion_length": 10, "global_batch_size": PROMPTS,
        "per_device_train_batch_size": 1, **changes,
    }  # fmt: skip


def start(folder: Path, name: str, **changes: Any) -> Finished:
    """A run under a strategy, with as many processes as its file says."""
    return launch(folder, load_strategy(name).num_processes, options(**changes), strategy=name)


@pytest.mark.parametrize(
    "name", mostly_long(["single", "ddp", "fsdp1", "fsdp2", "zero2", "zero3", "tp", "cp", "sp"], ["fsdp2"])
)
def test_a_server_samples_as_the_ranks_would(name: str, tmp_path: Path) -> None:
    """Control: answers of an adapter of another step differ, see the test below."""
    processes = load_strategy(name).num_processes
    with serving(BASE_DIR, "--enable-lora", "--api-key", KEY) as server:
        changes = {"strategy": name, API_KEY: KEY}
        finished = launch_well(tmp_path / "run", processes, options(sampler_url=server.url), **changes)
        loaded, unloaded = server.names("/load_lora_adapter"), server.names("/unload_lora_adapter")
        requested = server.names("/completions")
    assert max(finished.series("sampler_difference")) < 1e-5
    assert min(finished.series("grad_norm")) > 1e-3, "control: it learns"
    assert loaded == unloaded, "one after the other"
    assert len(set(loaded)) == len(loaded) == STEPS + 1, "an adapter for each step, and that of the evaluation"
    assert requested == [name for name in loaded[:-1] for _ in range(PROMPTS * GROUP)] + [loaded[-1]] * 3
    assert not finished.run.sampler.exists()
    texts = [path.read_text(errors="replace") for path in finished.run.path.rglob("*") if path.is_file()]
    assert KEY not in "".join([finished.output, *texts])
    assert any(server.url in text for text in texts), "control"

    # The ranks train the same on these answers, and find the same most likely answers.
    samples = name not in ("tp", "cp", "sp")
    own = {"recorded_answers": str(finished.run.rollouts)} | ({} if samples else {"eval_dataset_name": "none"})
    replayed = launch_well(tmp_path / "replayed", processes, options(**own), strategy=name)
    assert replayed.series("loss") == pytest.approx(finished.series("loss"), abs=1e-5)
    assert replayed.series("grad_norm") == pytest.approx(finished.series("grad_norm"), rel=1e-4)
    if samples:
        assert replayed.series("eval_reward") == finished.series("eval_reward")


def test_a_server_with_the_adapter_of_another_step_is_named(tmp_path: Path) -> None:
    with serving(BASE_DIR, "--enable-lora", "--fault", "stale") as server:
        finished = start(tmp_path / "run", "single", sampler_url=server.url, learning_rate=0.02, max_steps=12)
    assert finished.state["state"] == "failed"
    assert "the log-probabilities of its answers differ from the model's by" in finished.state["cause"]
    assert "it has other weights" in finished.state["cause"]
    differences = finished.series("sampler_difference")
    assert differences[0] < 1e-5, "the first adapter is the right one"
    assert max(differences) <= OTHER_WEIGHTS, "no step has learned from such answers"


@pytest.mark.long
@pytest.mark.parametrize("name", ["single", "tp"])
def test_a_server_samples_for_several_steps(name: str, tmp_path: Path) -> None:
    processes = load_strategy(name).num_processes
    changes = {"steps_per_generation": 2, "eval_dataset_name": "none"}
    with serving(BASE_DIR, "--enable-lora") as server:
        finished = launch_well(tmp_path / "run", processes, options(sampler_url=server.url, **changes), strategy=name)
        assert len(set(server.names("/load_lora_adapter"))) == STEPS / 2, "an adapter for each generation"
    assert max(finished.series("sampler_difference")) < 1e-5
    own = {"recorded_answers": str(finished.run.rollouts), "eval_dataset_name": "none"}
    replayed = launch_well(tmp_path / "replayed", processes, options(**own), strategy=name)
    assert replayed.series("loss") == pytest.approx(finished.series("loss"), abs=1e-5)
    assert replayed.series("grad_norm") == pytest.approx(finished.series("grad_norm"), rel=1e-4)


@pytest.mark.long
def test_at_another_temperature(tmp_path: Path) -> None:
    with serving(BASE_DIR, "--enable-lora") as server:
        refused = start(tmp_path / "raw", "single", sampler_url=server.url, temperature=0.7)
        assert "start it with --logprobs-mode processed_logprobs" in refused.state["cause"]
        server.set(logprobs_mode="processed_logprobs")
        finished = start(tmp_path / "run", "single", sampler_url=server.url, temperature=0.7)
    assert max(finished.series("sampler_difference")) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("name", ["single", "ddp"])
def test_a_server_that_dies_is_named_by_the_run(name: str, tmp_path: Path) -> None:
    after = str(PROMPTS * GROUP + 2)  # in the second step
    with serving(BASE_DIR, "--enable-lora", "--fault", "die", "--after", after) as server:
        finished = start(tmp_path / "run", name, sampler_url=server.url)
    assert finished.state["state"] == "failed"
    assert finished.state["cause"].startswith(f"no answer from sampler_url={server.url}/v1/completions (")
    assert len(finished.rows()) == 1
    assert "trainers/served.py" not in finished.output, "a sentence, not where it was raised"


@pytest.mark.long
def test_nobody_at_the_address_before_the_first_step(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    finished = start(tmp_path / "run", "ddp", sampler_url=url)
    assert finished.state["cause"].startswith(f"no answer from sampler_url={url}/health (ConnectError")
    assert not finished.run.metrics.exists() or not finished.rows()


@pytest.mark.long
def test_a_supervised_run_goes_on_with_a_server_that_was_restarted(tmp_path: Path) -> None:
    """The second server knows no adapter, which the run finds out in the middle of a step."""
    port = free_port()
    with ExitStack() as stack:
        first = stack.enter_context(
            serving(BASE_DIR, "--enable-lora", "--fault", "die", "--after", str(PROMPTS * GROUP + 2), port=port)
        )

        def serve_again() -> None:
            first.process.wait()
            stack.enter_context(serving(BASE_DIR, "--enable-lora", port=port))

        thread = threading.Thread(target=serve_again)
        thread.start()
        changes = options(sampler_url=first.url, save_steps=1, output_dir=str(tmp_path / "run"), max_restarts=2)
        done = tunesmith("train", "--num_processes", "1", *flags(changes), home=tmp_path)
        thread.join()
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert state["state"] == "done", done
    assert "restart 1 of 2, from step-" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.long
def test_a_resumed_run_goes_on_with_a_server(tmp_path: Path) -> None:
    """Its adapter is the checkpoint's; the address may be another, as servers move."""
    with serving(BASE_DIR, "--enable-lora") as server:
        finished = start(tmp_path / "run", "single", sampler_url=server.url, save_steps=2)
        again = {"resume_from_checkpoint": finished.checkpoints[0], "sampler_url": f"{server.url}/v1"}
        resumed = start(tmp_path / "again", "single", **again, save_steps=2)
    assert finished.checkpoints[0].name == "step-00000002"
    assert max(resumed.series("sampler_difference")) < 1e-5
    assert resumed.series("loss") == pytest.approx(finished.series("loss")[2:], abs=1e-5)
