"""Failures that are provoked, with what their diagnosis must be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainers.embedded import BASE_DIR

SMALL: dict[str, Any] = {
    "max_steps": 6, "max_train_samples": 60, "max_length": 128, "global_batch_size": 4,
    "per_device_train_batch_size": 2, "eval_dataset_name": "none", "logging_steps": 1, "max_restarts": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """One failure.

    Args:
        name: of the case.
        rule: the cause that must be found.
        provoke: a fault of `tests/faults/provoke`; empty where options or files are at fault.
        options: of the run, beside `SMALL`.
        says: what the sentence must say.
        applied: the remedy to apply, with which the run must finish; None where there is none.
        processes: of the run.
        direct: started by `accelerate launch`, which checks nothing before.
        make: writes files; returns further options, or variables of the environment in capitals.
        state: in which the run ends.
    """

    name: str
    rule: str
    provoke: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    says: str = ""
    applied: int | None = None
    processes: int = 1
    direct: bool = False
    make: Callable[[Path], dict[str, Any]] = lambda home: {}
    state: str = "failed"


# -- files -------------------------------------------------------------------------------------------------------------


def lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def chat(question: str, reply: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]}


def bad_rows(home: Path) -> dict[str, Any]:
    good = [chat(f"{number}?", "yes") for number in range(40)]
    return {"dataset_name": lines(home / "bad.jsonl", [*good, "{", *good]), "max_train_samples": "none"}


def long_rows(home: Path) -> dict[str, Any]:
    rows = [chat(f"{number}? " + "and so on " * 60, "yes, " * 60) for number in range(10)]
    rows += [chat(f"{number}?", "yes") for number in range(30)]
    return {"dataset_name": lines(home / "long.jsonl", rows), "overlong": "refuse"}


def all_too_long(home: Path) -> dict[str, Any]:
    rows = [chat(f"{number}? " + "and so on " * 30, "yes") for number in range(40)]
    return {"dataset_name": lines(home / "long.jsonl", rows), "overlong": "drop", "max_length": 64}


def few_rows(home: Path) -> dict[str, Any]:
    rows = [chat("1?", "yes"), chat("2?", "no"), chat("3?", "no")]
    return {"dataset_name": lines(home / "few.jsonl", rows), "packing": False}


def vanishing(home: Path) -> dict[str, Any]:
    path = lines(home / "data.jsonl", [chat(f"{number}?", "yes") for number in range(60)])
    return {"dataset_name": path, "DATA": path}


def model(home: Path, change: Callable[[Path], Any]) -> dict[str, Any]:
    shutil.copytree(BASE_DIR, home / "model")
    change(home / "model")
    return {"model_name_or_path": str(home / "model")}


def own_base(home: Path) -> dict[str, Any]:
    copied = model(home, lambda folder: None)
    return {**copied, "BASE": copied["model_name_or_path"], "merge_adapter": True}


def one_token_more(home: Path) -> dict[str, Any]:
    """A tokenizer with a token, used by the data, that the embedding does not have."""

    def add(folder: Path) -> None:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        size = json.loads((folder / "config.json").read_text())["vocab_size"]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": size, "content": "<new>", **flags})
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    rows = [chat(f"{number}?", "<new>") for number in range(60)]
    return {**model(home, add), "dataset_name": lines(home / "new.jsonl", rows)}


def own_reward(home: Path, score: str) -> dict[str, Any]:
    (home / "r.py").write_text(f"def score(prompts, completions, **columns):\n    return [{score} for _ in prompts]\n")
    return {"reward_funcs": f"{home / 'r.py'}:score"}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def template(folder: Path, text: str) -> dict[str, Any]:
    (folder / "own.jinja").write_text(text)
    return {"chat_template": str(folder / "own.jinja")}


ALL_ROWS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
NO_REPLY = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"

GRPO: dict[str, Any] = {"preset": "tiny-grpo", "max_steps": 2, "num_generations": 2, "max_completion_length": 8,
                        "max_length": 512}  # fmt: skip

# -- the table ---------------------------------------------------------------------------------------------------------

FAILURES = [
    # memory
    Failure("the CPU allocator refuses", "out_of_memory", "allocate", says="forward of step 3", applied=1),
    Failure("a limit on memory", "out_of_memory", "little_memory", applied=1),
    Failure("Python runs out", "out_of_memory", "python_memory", applied=1),
    Failure("a mapping is refused", "out_of_memory", "map_memory", applied=1),
    Failure("no smaller micro-batch is left", "out_of_memory", "allocate_unless_recomputed",
            {"per_device_train_batch_size": 1}, applied=1),
    Failure("an evaluation is too large", "out_of_memory", "allocate_in_evaluation",
            {"eval_dataset_name": "embedded", "max_eval_samples": 16, "eval_steps": 2}, says="evaluation", applied=1),
    Failure("memory runs out on one of two", "out_of_memory", "allocate", says="Rank 1", applied=1, processes=2),
    Failure("only sharding helps", "out_of_memory", "allocate_unless_sharded",
            {"per_device_train_batch_size": 1, "gradient_checkpointing": True}, applied=1, processes=2),
    Failure("killed", "killed", "kill", says="SIGKILL", applied=1),
    Failure("one of two is killed", "killed", "kill", says="Rank 1", applied=1, processes=2),
    # numbers
    Failure("a loss that is not a number", "not_finite", "nan", says="step 3", applied=1),
    Failure("a gradient without bound", "not_finite", "infinite_gradient", says="step 3", applied=1),
    Failure("not a number on one of two", "not_finite", "nan", says="rank 1", applied=1, processes=2),
    Failure("no update is finite any more", "skipped_updates", "nan_at_a_high_rate",
            {
        "max_steps": 14, "non_finite": "skip", "lr_scheduler_type": "constant"}, says="step 12", applied=1),
    Failure("a rate far too high", "diverged", options={
        "learning_rate": 10, "method": "full", "preset": "tiny-full", "max_grad_norm": 0, "max_steps": 30,
        "warmup_ratio": 0, "lr_scheduler_type": "constant"}, applied=1),
    Failure("a spike of the loss", "loss_spike", "spike", {"max_steps": 14, "loss_spike_factor": 20},
            says="step 12", applied=2, direct=True),
    # waiting
    Failure("a rank takes longer than allowed", "hang", "pause", {"hang_timeout": 2}, says="forward of step 3",
            applied=1),
    Failure("one of two takes longer than allowed", "hang", "pause", {"hang_timeout": 2}, says="Rank 1", applied=1,
            processes=2),
    Failure("a rank is stopped", "hang", "stop", {"hang_timeout": 3}, says="SIGSTOP", processes=2),
    Failure("a collective that one never joins", "collective_timeout", "lonely_collective"),
    Failure("a barrier that one never reaches", "collective_timeout", "lonely_barrier"),
    # network
    Failure("a port is taken", "port_taken", "taken_port", says="is taken by another program: "),
    Failure("a port is bound twice", "port_taken", "bind_twice"),
    Failure("nobody listens", "connection_refused", "refused"),
    Failure("a connection is refused", "connection_refused", "refused_by_python"),
    Failure("a machine without an address", "unknown_host", "unknown_host"),
    Failure("a name that does not resolve", "unknown_host", "unknown_to_python"),
    Failure("another rank leaves without a word", "peer_lost", "end_at_once", processes=2),
    # crashes
    Failure("a segmentation fault", "native_crash", "read_nothing", says="SIGSEGV", applied=1),
    Failure("an abort", "native_crash", "abort", says="SIGABRT", applied=1),
    Failure("a division in compiled code", "native_crash", "sigfpe", says="SIGFPE"),
    Failure("a mapped file shrinks", "bus_error", "truncated_map", says="was cut off"),
    Failure("an unknown instruction", "illegal_instruction", "sigill"),
    Failure("ended from outside", "terminated", "sigquit", says="SIGQUIT"),
    Failure("the launcher is killed", "launcher_killed", "end_launcher"),
    Failure("a package of another version", "other_version", "other_version", says="peft"),
    Failure("no such library", "missing_library", "no_library", says="libcudart.so.99"),
    Failure("a package is missing", "missing_package", "missing_package", says="flash_attention_of_tomorrow"),
    Failure("an index out of range", "cuda_assert", "index_out_of_range"),
    Failure("an error that no rule knows", "", "own_mistake", says="ValueError: CUDA out of memory is what"),
    # disk
    Failure("the disk is full", "disk_full", "full_disk", {"save_steps": 2}),
    Failure("the disk is full at the export", "disk_full", "full_disk_in_export"),
    Failure("a file where checkpoints go", "path_in_the_way", "in_the_way", {"save_steps": 4}, says="checkpoints"),
    Failure("a file may not grow", "file_limit", "no_growth", {"save_steps": 4}),
    Failure("a file that nobody may write", "not_writable", "forbidden"),
    Failure("the disk fails", "disk_error", "bad_disk"),
    Failure("too many files", "too_many_files", "no_descriptors"),
    Failure("no more threads", "too_many_threads", "no_threads"),
    # data
    Failure("the data is removed", "missing_data", "remove_data", make=vanishing),
    Failure("rows that cannot be read", "bad_rows", make=bad_rows, applied=1, direct=True),
    Failure("rows too long", "rows_too_long", make=long_rows, applied=1, direct=True),
    Failure("nothing is left to train", "trains_nothing", make=all_too_long, applied=1, direct=True),
    Failure("a reward that raises", "reward_fails", options=GRPO, says="KeyError: 'CUDA out of memory'",
            make=lambda home: own_reward(home, "{}['CUDA out of memory']")),
    Failure("a reward that is no number", "reward_fails", options=GRPO, says="not a finite number",
            make=lambda home: own_reward(home, "float('nan')")),
    Failure("fewer rows than a batch", "small_data", make=few_rows, applied=1, direct=True),
    Failure("no such split", "missing_data", options={"dataset_name": "/no/such/data.jsonl"}, direct=True),
    Failure("a template without replies", "template_fails", make=lambda home: template(home, NO_REPLY), direct=True),
    # model
    Failure("no such model", "missing_model", options={"model_name_or_path": "./no-such-model"}, direct=True),
    Failure("the Hub is offline", "hub_unreachable", options={"model_name_or_path": "owner/model"}, direct=True),
    Failure("weights cut off", "damaged_model", direct=True,
            make=lambda home: model(home, lambda folder: cut(folder / "model.safetensors"))),
    Failure("the base is removed", "missing_model", "remove_base", says="/model does not exist", make=own_base),
    Failure("one token more", "wrong_tokenizer", direct=True, make=one_token_more),
    Failure("no tokenizer", "no_tokenizer", direct=True,
            make=lambda home: model(home, lambda folder: (folder / "tokenizer.json").unlink())),
    Failure("no chat template", "no_chat_template", direct=True,
            make=lambda home: model(home, lambda folder: (folder / "chat_template.jinja").unlink())),
    # services
    Failure("a tracker does not start", "tracker", "block_tracker", {"report_to": "tensorboard"}, state="done",
            make=lambda home: {"BLOCKED": str(home / "runs" / "mine" / "tunesmith")}),
    Failure("copies cannot be written", "copy_unreachable", options={"checkpoint_url": "s3://no-such-bucket-/x"},
            applied=1, direct=True),
    Failure("an export that differs", "export_differs", "other_export", {"export_dtype": "bfloat16"}, applied=1),
    # training that does not help
    Failure("a rate far too low", "flat_loss", options={
        "learning_rate": 1e-9, "max_steps": 48, "max_train_samples": 4, "packing": False}, applied=1, state="done"),
    Failure("warm-up without end", "long_warmup", options={"warmup_steps": 500, "max_steps": 30}, applied=1,
            state="done"),
    Failure("learned by heart", "overfit", options={
        "preset": "tiny-full", "max_train_samples": 8, "max_steps": 30, "eval_dataset_name": "embedded",
        "max_eval_samples": 32, "eval_steps": 5, "learning_rate": 6e-3, "save_steps": 0}, applied=1, state="done"),
    Failure("data that comes slowly", "data_wait", "slow_data", {"max_steps": 30}, state="done"),
    Failure("a pipeline with two micro-batches", "pipeline_bubble", options={"strategy": "pp", "max_steps": 12},
            applied=1, processes=2, state="done"),
    Failure("one of two is slow", "slow_rank", "slow_rank", {"max_steps": 60}, says="Rank 1", processes=2,
            state="done"),
    Failure("a template without an end", "stop_token", make=lambda home: template(home, ALL_ROWS), state="done"),
]  # fmt: skip
