"""Writes run folders as the trainer would have left them, without training anything."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from app.eval.folder import EvaluationFolder
from app.prove.proof import LOSS_TOLERANCE, NORM_TOLERANCE
from app.runs.proofs import ProofFolder
from trainers.config.parse import dump_yaml
from trainers.config.validation import build
from trainers.config.yaml_file import parse_yaml
from trainers.run.compatibility import plain, versions
from trainers.run.folder import RunFolder, write_json
from trainers.run.manifest import FORMAT, seal
from trainers.strategy.strategy import load_strategy, resolve

BEGUN = datetime(2026, 11, 20, 8, 0, tzinfo=UTC)


def made_run(
    runs_dir: Path, name: str, state: str = "done", steps: int = 60, strategy: str = "ddp", world: int = 2, **more: Any
) -> RunFolder:
    """A run folder with config, state, metrics and a short log.

    Args:
        runs_dir: folder of run folders.
        name: the run's id.
        state: its state; the processes of a live one have to be given in `processes`.
        steps: steps that were logged, of `total_steps` (default: as many).
        strategy: name of the strategy.
        world: ranks.
        **more: other keys of the state file; `config`: options that differ; `resumed_at`: step at which a second
            attempt began; `minutes`: when it began, after `BEGUN`.
    """
    options = {"preset": "tiny-lora", "model_name_or_path": "embedded", "dataset_name": "embedded"}
    config = build({**options, **more.pop("config", {})})
    resumed_at, minutes = more.pop("resumed_at", None), more.pop("minutes", 0)
    begun = BEGUN + timedelta(minutes=minutes)
    run = RunFolder(runs_dir / name)
    run.create()
    run.config.write_text(dump_yaml(config), encoding="utf-8")
    run.accelerate.write_text(resolve(load_strategy(strategy), world, config.mixed_precision).dump(), encoding="utf-8")
    gpus = more.pop("gpus", "")
    run.command.write_text(f"CUDA_VISIBLE_DEVICES={gpus} python train.py\n" if gpus else "python train.py\n")
    run.metrics.write_text("".join(metric_lines(steps, world, resumed_at, config.learning_rate)), encoding="utf-8")
    run.log.write_text("".join(log_lines(steps, world)), encoding="utf-8")
    state_of = {
        "id": name, "state": state, "cause": None, "step": steps, "total_steps": steps, "host": os.uname().nodename,
        "attempt": 0 if resumed_at is None else 1, "processes": [], "started_at": begun.isoformat(),
        "updated_at": (begun + timedelta(seconds=2 * steps)).isoformat(), "export_dir": None,
    }  # fmt: skip
    write_json(run.state_file, state_of | more)
    return run


def metric_lines(steps: int, world: int = 2, resumed_at: int | None = None, rate: float = 3e-3) -> list[str]:
    """Rows of `metrics.jsonl`; a second attempt repeats what came after step `resumed_at`."""
    rows = [line for step in range(1, steps + 1) for line in _rows(step, steps, world, 0, rate)]
    if resumed_at is not None:
        died = min(steps, resumed_at + max(1, steps // 6))
        rows = [line for step in range(1, died + 1) for line in _rows(step, steps, world, 0, rate)]
        rows += [line for step in range(resumed_at + 1, steps + 1) for line in _rows(step, steps, world, 1, rate)]
    return rows


def _rows(step: int, steps: int, world: int, attempt: int, rate: float) -> list[str]:
    noise = math.sin(step * 12.9898) * 0.05
    loss = 2.2 * math.exp(-3 * step / steps) + 0.3 + noise + 0.02 * attempt
    row = {
        "step": step, "attempt": attempt, "epoch": step / 100, "loss": loss, "grad_norm": 0.5 + abs(noise) * 9,
        "learning_rate": rate * 0.5 * (1 + math.cos(math.pi * step / steps)),
        "tokens_per_second": 5200 + 900 * math.sin(step / 9), "trained_tokens_per_second": 1800 + 300 * noise,
        "mfu": None, "data_wait": 0.002, "memory_gib": 1.4 + 0.1 * math.sin(step / 5),
        "memory_gib_by_rank": [1.4 - 0.05 * rank for rank in range(world)], "tokens": step * 3680,
        "elapsed_s": step * 0.7, "eta_s": (steps - step) * 0.7,
    }  # fmt: skip
    lines = [json.dumps(row) + "\n"]
    if step % max(1, steps // 6) == 0:
        lines.append(json.dumps({"step": step, "attempt": attempt, "eval_loss": loss + 0.1}) + "\n")
    return lines


def log_lines(steps: int, world: int = 2) -> list[str]:
    """Lines of `log.txt`: a start, and a line per step of every rank."""
    made = ["2026-11-20T08:00:00.000+00:00 [launcher] *** Setting OMP_NUM_THREADS ***\n"]
    for step in range(1, steps + 1):
        time = (BEGUN + timedelta(seconds=2 * step)).isoformat(timespec="milliseconds")
        made += [f"{time} [rank {rank}] step {step} loss 0.4273 tokens_per_second 2662\n" for rank in range(world)]
    return made


def manifest_tensors(model: Any) -> dict[str, Any]:
    """What the manifest of a checkpoint of a model says of its weights."""
    from trainers.checkpoint.weights import saved_tensors

    shapes = {name: list(tensor.shape) for name, tensor in saved_tensors(model).items()}
    return {f"model.{name}": {"shape": shape, "dtype": "float32"} for name, shape in shapes.items()}


def add_sealed_checkpoint(run: RunFolder, step: int, **parts: Any) -> Path:
    """A published checkpoint without files, whose manifest is as good as a real one.

    Args:
        parts: of the manifest; its config and versions are those of the run and of here.
    """
    folder = run.checkpoints / f"step-{step:08}"
    folder.mkdir(parents=True)
    config = plain(build(parse_yaml(run.config.read_text(encoding="utf-8"), "config")))
    manifest = {"format": FORMAT, "step": step, "world": 1, "progress": {"step": step}, "files": {}, "tensors": {},
                "base": "", "data_fingerprint": "", "config": config, "versions": versions(), **parts}  # fmt: skip
    write_json(folder / "manifest.json", {**manifest, "seal": seal(manifest)})
    return folder


def add_checkpoint(run: RunFolder, step: int, best: int | None = None, files: Sequence[int] = (4096,)) -> Path:
    """A published checkpoint with a manifest and files of these sizes in bytes."""
    folder = run.checkpoints / f"step-{step:08}"
    folder.mkdir(parents=True)
    for rank, size in enumerate(files):
        (folder / f"rank-{rank:05}.safetensors").write_bytes(b"\0" * size)
    progress = {"step": step, "best_step": best, "best_score": None, "tokens": step * 3680, "elapsed_s": step * 0.7}
    write_json(folder / "manifest.json", {"format": 1, "step": step, "world": len(files), "progress": progress})
    return folder


def proof_document(passed: bool | None, loss: Any = 4e-8, norm: Any = 1e-5, **parts: Any) -> dict[str, Any]:
    """What `tunesmith prove` reports of one strategy.

    Args:
        passed: the verdict.
        loss: largest difference of the loss.
        norm: largest difference of the gradient norm.
        parts: of the document; `row`: of its row.
    """
    row = {"strategy": "ddp", "world_size": 2, "passed": passed, "max_loss_difference": loss, "reason": None,
           "max_grad_norm_difference": norm, "bit_equal_steps": 3, "seconds": 20.5, **parts.pop("row", {})}  # fmt: skip
    tolerance = {"loss": LOSS_TOLERANCE, "grad_norm": NORM_TOLERANCE}
    return {"steps": 20, "rows": [row], "tolerance": tolerance, "interrupted": False,
            "reference": {"cause": None, "seconds": 10}, **parts}  # fmt: skip


def add_proof(run: RunFolder, document: Any, number: int = 1, control: bool = False, output: str = "") -> ProofFolder:
    """A proof that has ended.

    Args:
        run: the run.
        document: its report; None if it left none.
        number: of the proof.
        control: whether it trained with the known fault.
        output: what it printed.
    """
    proof = ProofFolder(run.path / "proofs" / str(number))
    run.own_folder("proofs")
    proof.report.mkdir(parents=True)
    proof.write_note({"control": control, "started_at": BEGUN.isoformat()})
    proof.output.write_text(output, encoding="utf-8")
    if document is not None:
        write_json(proof.report / "report.json", document)
        (proof.report / "report.md").write_text("# Does the strategy change the model?\n", encoding="utf-8")
    return proof


def evaluation_document(**parts: Any) -> dict[str, Any]:
    """The report of `tunesmith eval` on a base and a run: a metric with sources that differs, and one that does not."""
    values = {"base": (2.0, 0.5), "a-run": (1.0, 0.51)}
    rows = [{"model": model, "source": None, "metric": metric, "value": value, "low": value - 0.1, "high": value + 0.1,
             "rows": 400} for index, metric in enumerate(("loss", "exact_match"))
            for model, value in ((model, pair[index]) for model, pair in values.items())]  # fmt: skip
    rows += [{**row, "source": source, "value": row["value"] * share, "rows": 200} for row in rows[:2]
             for source, share in (("mails", 1.25), ("notes", 0.75))]  # fmt: skip
    pair = {"a": "base", "b": "a-run", "source": None, "rows": 400}
    comparisons = [
        {**pair, "metric": "loss", "difference": -1.0, "low": -1.1, "high": -0.9, "p_value": 1e-4, "significant": True},
        {**pair, "metric": "exact_match", "difference": 0.01, "low": -0.04, "high": 0.06, "p_value": 0.7,
         "significant": False},
    ]  # fmt: skip
    changed = [{"a": "base", "b": "a-run", "row": "test.jsonl:3", "source": None, "metric": "f1", "before": 0.5,
                "after": 1.0, "was_right": False, "is_right": True, "prompt": "What is it?", "expected": "a big bird",
                "answer_a": "a big cat", "answer_b": "a big bird"}]  # fmt: skip
    return {"metrics": ["loss", "exact_match"], "rows": rows, "comparisons": comparisons, "changed": changed,
            "notes": ["base: 3 of 400 answers were cut"], "failed": {}, "interrupted": False,
            "command": ["tunesmith", "eval", "a-run", "--answer_tokens", "8"], **parts}  # fmt: skip


def parts_besides(difference: float = 1.0) -> dict[str, Any]:
    """Parts of the report of `tunesmith eval` with `--forgetting`, a judge and tasks, as it writes them.

    Args:
        difference: of every comparison, all of which are significant.
    """
    pair = {"a": "base", "b": "a-run", "source": None, "difference": difference, "low": difference - 0.1,
            "high": difference + 0.1, "p_value": 1e-4, "significant": True, "rows": 40}  # fmt: skip
    values = {"source": None, "value": 0.5, "low": 0.4, "high": 0.6, "rows": 40}
    general = {"sample": "general text", "metric": "loss"}
    of_task = {"task": "quiz", "metric": "acc", "higher_is_better": True}
    return {
        "forgetting": {
            "samples": [{"name": "general text", "dataset": "passages.jsonl"}],
            "rows": [{**general, **values, "model": model} for model in ("base", "a-run")],
            "comparisons": [{**pair, **general, "verdict": "forgot" if difference > 0 else "better"}],
            "notes": ["general text: one row was cut"],
        },
        "judge": {
            "metric": "judge_win", "model": "judge-1", "url": "http://127.0.0.1:9/v1",
            "rows": [{**values, "model": model, "against": other, "metric": "judge_win"}
                     for model, other in (("base", "a-run"), ("a-run", "base"))],
            "comparisons": [{**pair, "metric": "judge_win", "wins": 30, "losses": 5, "ties": 4, "identical": 1}],
            "notes": ["2 rows without a verdict in both orders left out"], "malformed": {}, "usage": {}, "failed": None,
        },
        "tasks": {
            "version": "0.4.13",
            "rows": [{**of_task, "model": model, "value": 0.5, "stderr": 0.05, "rows": 40}
                     for model in ("base", "a-run")],
            "comparisons": [{**pair, **of_task, "verdict": "better" if difference > 0 else "worse"}],
        },
    }  # fmt: skip


def add_evaluation(
    runs_dir: Path, document: dict[str, Any] | None, name: str = "eval-1", **note: Any
) -> EvaluationFolder:
    """An evaluation that has ended.

    Args:
        runs_dir: folder of run folders.
        document: its report; None leaves it out.
        name: of its folder.
        note: of its note.
    """
    folder = EvaluationFolder(runs_dir / name)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_note({"models": [], "started_at": BEGUN.isoformat(), "host": os.uname().nodename, **note})
    if document is not None:
        write_json(folder.report, document)
    return folder
