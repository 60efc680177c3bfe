"""Tasks of lm-evaluation-harness: their values are those of our own evaluation, and of the harness's own loader."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from tests.e2e.test_commands import tunesmith
from trainers.embedded import BASE_DIR, DATA_DIR

ROWS = 12
EXACT = """\
task: facts
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/facts.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{expected}}"
generation_kwargs: {until: ["<|end|>"], max_gen_toks: 64, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
LOSS = """\
task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, the rows of its evaluation as task data, and a task file for answers and one for losses."""
    folder = tmp_path_factory.mktemp("tasks")
    options = ["--max_steps", "30", "--max_train_samples", "400", "--learning_rate", "3e-3", "--output_dir", "runs/a"]
    done = tunesmith("train", "tiny-lora", *options, "--max_eval_samples", str(ROWS), "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    lines = (DATA_DIR / "eval.jsonl").read_text().splitlines()[:ROWS]
    texts = [json.dumps({"text": json.loads(line)["messages"][0]["content"]}) for line in lines]
    (folder / "texts.jsonl").write_text("\n".join(texts) + "\n")
    done = tunesmith("eval", "runs/a", "--answer_tokens", "64", "--metrics", "exact_match", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    rows = (Path(document["report_dir"]) / "1-base" / "evaluation.jsonl").read_text()
    (folder / "facts.jsonl").write_text(rows)
    (folder / "own.json").write_text(done.stdout)
    for name, text in (("facts", EXACT), ("texts", LOSS)):
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
    return folder


def value(entries: list[dict[str, Any]], **wanted: Any) -> Any:
    (match,) = [each["value"] for each in entries if all(each[key] == value for key, value in wanted.items())]
    return match


def test_answers_and_losses_are_those_of_our_own_evaluation(folder: Path) -> None:
    words = ["runs/a", "--tasks", "facts.yaml,texts.yaml", "--dataset_name", "texts.jsonl", "--answer_tokens", "0"]
    done = tunesmith("eval", *words, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    tasks = document["tasks"]["rows"]
    own = json.loads((folder / "own.json").read_text())["rows"]
    for model in ("base", "a"):
        measured = value(tasks, model=model, task="facts", metric="exact_match")
        assert measured == pytest.approx(value(own, model=model, metric="exact_match"))
        ours = value(document["rows"], model=model, metric="loss")
        per_byte = value(tasks, model=model, task="texts", metric="bits_per_byte")
        print(model, measured, ours, per_byte)
    assert value(tasks, model="a", task="facts", metric="exact_match") > 0, "it has learned something"
    (compared,) = [entry for entry in document["tasks"]["comparisons"] if entry["task"] == "facts"]
    assert compared["rows"] == ROWS
    stock = lm_eval.simple_evaluate(
        HFLM(pretrained=str(BASE_DIR), device="cpu", batch_size=1), tasks=[str(folder / "texts.yaml")],
        task_manager=TaskManager(include_defaults=False), bootstrap_iters=0,
    )  # fmt: skip
    assert value(tasks, model="base", task="texts", metric="bits_per_byte") == pytest.approx(
        stock["results"]["texts"]["bits_per_byte,none"], rel=1e-5
    )
    assert math.isfinite(value(tasks, model="a", task="texts", metric="bits_per_byte"))


def test_what_the_harness_does_not_know_is_refused_before_a_model_runs(folder: Path) -> None:
    for task, line in (("none.yaml", "tasks=none.yaml is not a file"), ("no_such_task", "is no task of lm-eval")):
        done = tunesmith("eval", "runs/a", "--tasks", task, cwd=folder)
        assert done.returncode == 2, done.stderr
        assert line in done.stderr
        assert "[1/2]" not in done.stderr
