"""What changed since a checkpoint was saved is named, and the run does not go on with it unless it is forced."""

from __future__ import annotations

import json
from pathlib import Path

from tests.detached import ended, state_of, step_of, train_words, tunesmith, until
from tests.faults.oracle import OPTIONS
from trainers.run.folder import RunFolder


def rows(path: Path, word: str) -> None:
    turns = [
        [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": word}] for number in range(60)
    ]
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns))


def test_changed_data_and_options_are_named_and_refused(home: Path) -> None:
    rows(home / "data.jsonl", "yes")
    run = RunFolder(home / "runs" / "mine")
    options = {**OPTIONS, "dataset_name": home / "data.jsonl", "max_steps": 4000, "max_train_samples": 50}
    assert tunesmith(*train_words(run, 1, **options), home=home).returncode == 0
    until(lambda: state_of(run) == "running" and step_of(run) >= 2)
    assert tunesmith("stop", "mine", home=home).returncode == 0
    before, config = ended(run)["step"], run.config.read_bytes()

    other = tunesmith("resume", "mine", "--learning_rate", "0.5", home=home)
    assert other.returncode == 2
    assert f"learning_rate=0.5, and 0.003 when the checkpoint of step {before} was saved" in other.stderr
    assert "--force" in other.stderr
    assert run.config.read_bytes() == config

    rows(home / "data.jsonl", "no")
    assert tunesmith("resume", "mine", home=home).returncode == 1
    state = ended(run)
    assert (state["state"], state["step"]) == ("failed", before)
    assert "the data, its tokenizer or its options changed since it was saved" in state["cause"]

    assert tunesmith("resume", "mine", "--learning_rate", "0.5", "--force", "--detach", home=home).returncode == 0
    until(lambda: state_of(run) == "running" and step_of(run) > before)
    assert tunesmith("stop", "mine", home=home).returncode == 0
    log = run.log.read_text()
    assert "warning: the data has changed since the checkpoint was saved" in log
    assert "warning: learning_rate=0.5, and 0.003" in log
