"""Tasks of lm-evaluation-harness: their values are those of our own evaluation, and of the harness's own loader."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from tests.e2e.test_commands import tunesmith
from trainers.embedded import BASE_DIR, DATA_DIR
from trainers.tools.harness import _loaded

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
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of an evaluation of a run and its base; beside it a task file for answers and one for losses."""
    folder = tmp_path_factory.mktemp("tasks")
    options = ["--max_steps", "30", "--max_train_samples", "400", "--learning_rate", "3e-3", "--output_dir", "runs/a"]
    done = tunesmith("train", "tiny-lora", *options, "--max_eval_samples", str(ROWS), "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    lines = (DATA_DIR / "eval.jsonl").read_text().splitlines()[:ROWS]
    texts, facts = [], []
    for line in lines:
        question, answer = (message["content"] for message in json.loads(line)["messages"])
        texts.append({"text": question})
        facts.append({"prompt": f"User:\n{question}\n\nAssistant:\n", "expected": answer})
    for name, rows, task in (("texts", texts, LOSS), ("facts", facts, EXACT)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(task.replace("FOLDER", str(folder)))
    argv = ["runs/a", "--tasks", "facts.yaml,texts.yaml", "--answer_tokens", "64", "--metrics", "loss,exact_match"]
    done = tunesmith("eval", *argv, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout)["report_dir"])


def value(entries: list[dict[str, Any]], **wanted: Any) -> Any:
    (match,) = [each["value"] for each in entries if all(each[key] == value for key, value in wanted.items())]
    return match


def evaluated(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "evaluation.jsonl").read_text().splitlines()]


def test_answers_are_those_of_our_own_evaluation(report: Path) -> None:
    """But for space around them, which the harness's exact match does not leave out."""
    document = json.loads((report / "report.json").read_text())
    tasks = document["tasks"]["rows"]
    for model, run in (("base", "1-base"), ("a", "2-a")):
        own = [row["answer"] == row["expected"] for row in evaluated(report / run)]
        assert value(tasks, model=model, task="facts", metric="exact_match") == pytest.approx(sum(own) / ROWS)
    assert value(tasks, model="a", task="facts", metric="exact_match") > 0, "it has learned something"
    (compared,) = [entry for entry in document["tasks"]["comparisons"] if entry["task"] == "facts"]
    assert (compared["a"], compared["b"], compared["rows"]) == ("base", "a", ROWS)


def test_values_are_those_of_the_harness_with_its_own_loader(report: Path) -> None:
    tasks = json.loads((report / "report.json").read_text())["tasks"]["rows"]
    file = report.parent.parent / "texts.yaml"
    stock = lm_eval.simple_evaluate(
        HFLM(pretrained=str(BASE_DIR), device="cpu", batch_size=1), tasks=[str(file)],
        task_manager=TaskManager(include_defaults=False), bootstrap_iters=0,
    )  # fmt: skip
    wanted = pytest.approx(stock["results"]["texts"]["bits_per_byte,none"], rel=1e-5)
    assert value(tasks, model="base", task="texts", metric="bits_per_byte") == wanted
    assert value(tasks, model="a", task="texts", metric="bits_per_byte") != wanted, "its adapter is there"


@pytest.mark.parametrize("run", ["1-base", "2-a"])
def test_losses_are_those_of_our_own_evaluation(run: str, report: Path) -> None:
    """The harness moves white space at the end of a prompt to the answer; what that costs is taken off."""
    model, tokenizer, batch_size = _loaded(report / run)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)

    def log_likelihoods(answers: list[str]) -> list[float]:
        pairs = zip((row["prompt"].rstrip() for row in rows), answers, strict=True)
        requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
        return [likelihood for likelihood, _ in harness.loglikelihood(requests)]

    rows = evaluated(report / run)
    full = log_likelihoods([f"\n{row['expected']}<|end|>" for row in rows])
    space = log_likelihoods(["\n"] * len(rows))
    losses = [before - after for before, after in zip(space, full, strict=True)]
    assert losses == pytest.approx([row["loss"] for row in rows], abs=1e-3)
    assert full != pytest.approx([-row["loss"] for row in rows], abs=1e-2), "control"


def test_what_the_harness_does_not_know_is_refused_before_a_model_runs(report: Path) -> None:
    for task, line in (("none.yaml", "tasks=none.yaml is not a file"), ("no_such_task", "is no task of lm-eval")):
        done = tunesmith("eval", "runs/a", "--tasks", task, cwd=report.parent.parent)
        assert done.returncode == 2, done.stderr
        assert line in done.stderr
        assert "[1/2]" not in done.stderr


def test_a_chat_template_makes_the_prompts_of_our_own_evaluation(report: Path) -> None:
    """On two processes. The control asks the same without a template, and gets another answer."""
    folder = report.parent.parent
    rows = [json.loads(line) for line in (folder / "facts.jsonl").read_text().splitlines()]
    bare = [row | {"prompt": row["prompt"].removeprefix("User:\n").removesuffix("\n\nAssistant:\n")} for row in rows]
    (folder / "bare.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bare))
    task = EXACT.replace("FOLDER/facts", f"{folder}/bare").replace("task: facts", "task: bare")
    (folder / "bare.yaml").write_text(task)
    argv = [
        "runs/a",
        "--base",
        "none",
        "--tasks",
        "bare.yaml",
        "--answer_tokens",
        "64",
        "--num_processes",
        "2",
        "--json",
    ]
    own = [row["answer"] == row["expected"] for row in evaluated(report / "2-a")]
    shares = []
    for more in (["--tasks_chat_template"], []):
        done = tunesmith("eval", *argv, *more, cwd=folder)
        assert done.returncode == 0, done.stderr
        shares.append(value(json.loads(done.stdout)["tasks"]["rows"], task="bare", metric="exact_match"))
    assert shares[0] == pytest.approx(sum(own) / ROWS)
    assert shares[1] < shares[0], "control"


def test_a_model_without_a_chat_template_says_so(report: Path) -> None:
    folder = report.parent.parent
    copy = Path(shutil.copytree(BASE_DIR, folder / "plain"))
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None}))
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    texts = ["--dataset_name", "texts.jsonl", "--tasks", "texts.yaml", "--tasks_chat_template"]
    done = tunesmith("eval", "plain", "--base", "none", *texts, cwd=folder)
    assert done.returncode == 1, done.stderr
    assert "needs a chat template, and this model has none" in done.stderr
