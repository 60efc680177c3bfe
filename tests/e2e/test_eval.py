"""`tunesmith eval` as its user types it: a base, a run and a checkpoint of it on the same rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_commands import tunesmith


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    options = ["--max_steps", "12", "--save_steps", "4", "--max_train_samples", "400", "--max_eval_samples", "16"]
    done = tunesmith("train", "tiny-lora", *options, "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "runs").iterdir()
    return run


def test_models_are_compared_on_the_same_rows(trained: Path) -> None:
    folder, run = trained.parent.parent, trained.name
    (folder / "mine.py").write_text("def length(prompts, answers, expected):\n    return [len(a) for a in answers]\n")
    checkpoint = f"{run}@step-00000008"
    arguments = [run, checkpoint, "--metrics", "loss,exact_match,mine.py:length", "--answer_tokens", "48"]
    done = tunesmith("eval", *arguments, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads(Path(document["report_dir"], "report.json").read_text())
    assert document["failed"] == {}
    values = {(row["model"], row["metric"].rpartition(":")[2]): row for row in document["rows"]}
    assert {model for model, _ in values} == {"base", run, checkpoint}
    assert {metric for _, metric in values} == {"loss", "exact_match", "length"}
    assert all(row["low"] <= row["value"] <= row["high"] and row["rows"] == 16 for row in values.values())
    assert values[run, "loss"]["value"] < values[checkpoint, "loss"]["value"] < values["base", "loss"]["value"]
    metrics = (trained / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line)["eval_loss"] for line in metrics if "eval_loss" in json.loads(line)]
    assert values[run, "loss"]["value"] == pytest.approx(logged[-1], abs=1e-5)
    compared = {(entry["b"], entry["metric"]): entry for entry in document["comparisons"]}
    assert {entry["a"] for entry in compared.values()} == {"base"}
    assert compared[run, "loss"]["significant"] is True
    assert compared[run, "loss"]["difference"] < 0
    assert not list(Path(document["report_dir"]).glob("exports/*"))
    listed = json.loads(tunesmith("runs", "list", "--json", cwd=folder).stdout)
    assert [entry["id"] for entry in listed] == [run], "the runs of a report are not listed"


def test_a_model_that_fails_leaves_the_others(trained: Path) -> None:
    folder, run = trained.parent.parent, trained.name
    weights = trained / "checkpoints" / "step-00000008"
    for file in weights.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-9])
    done = tunesmith("eval", run, f"{run}@step-00000008", "--base", "none", "--answer_tokens", "0", cwd=folder)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"{run}@step-00000008" in done.stderr
    assert "perplexity (lower is better)" in done.stdout
    assert "exact_match" not in done.stdout


@pytest.mark.long
def test_a_model_that_was_trained_hard_forgets_and_an_untouched_copy_does_not(tmp_path: Path) -> None:
    options = ["--max_steps", "60", "--max_train_samples", "300", "--learning_rate", "2e-3", "--max_eval_samples", "8"]
    done = tunesmith("train", "tiny-full", *options, "--output_dir", "runs/hard", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "own.txt").write_text("".join(f"Line {number} of what was known before.\n" for number in range(30)))
    argv = ["runs/hard", "embedded", "--forgetting", "--forgetting_dataset", "own.txt", "--answer_tokens", "0"]
    done = tunesmith("eval", *argv, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    part = json.loads(done.stdout)["forgetting"]
    verdicts = {(each["sample"], each["b"]): each["verdict"] for each in part["comparisons"]}
    assert verdicts["general text", "hard"] == "forgot"
    assert verdicts["general text", "embedded"] == verdicts["own", "embedded"] == "no difference shown"
    missing = tunesmith("eval", "runs/hard", "--forgetting_dataset", "none.txt", cwd=tmp_path)
    assert missing.returncode == 2
    assert "none.txt" in missing.stderr
    assert "[1/2]" not in missing.stderr, "it is refused before the first model runs"


@pytest.mark.long
def test_a_run_of_a_mix_is_evaluated_by_source(tmp_path: Path) -> None:
    """The loss of each source is the one that training logged; a source alone is the control."""
    rows = [{"prompt": f"Say {number}.", "completion": f"It is {number * 7 % 10}."} for number in range(120)]
    (tmp_path / "numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mix.yaml").write_text("""\
sources:
  - {dataset_name: embedded, name: facts, limit: 200, weight: 2}
  - {dataset_name: numbers.jsonl, weight: 1}
""")
    options = ["--dataset_name", "none", "--eval_dataset_name", "none", "--mix", "mix.yaml", "--eval_share", "0.1"]
    done = tunesmith("train", "tiny-lora", *options, "--max_steps", "6", "--output_dir", "runs/mixed", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/mixed/metrics.jsonl").read_text().splitlines()]
    logged = next(line for line in reversed(lines) if "eval_loss" in line)
    done = tunesmith("eval", "mixed", "--answer_tokens", "0", "--metrics", "loss", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    values = {row["source"]: row["value"] for row in document["rows"] if row["model"] == "mixed"}
    assert values == pytest.approx({
        None: logged["eval_loss"], "facts": logged["eval_loss/facts"], "numbers": logged["eval_loss/numbers"],
    }, abs=1e-4)  # fmt: skip
    assert abs(values["facts"] - values["numbers"]) > 0.1
    assert {entry["source"] for entry in document["comparisons"]} == {None, "facts", "numbers"}
