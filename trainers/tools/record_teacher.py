"""Records what a teacher predicts, for `teacher_log_probs`: `python -m trainers.tools.record_teacher`.

The program behind `tunesmith record`. One process, on the first GPU if there is one. Prints a line for each tenth on
stderr, and one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainers.config.mistakes import ConfigError, errors_about
from trainers.config.options import TrainConfig
from trainers.config.teacher import teacher_config
from trainers.config.validation import build
from trainers.config.yaml_file import read_yaml
from trainers.data.fill_cache import Split
from trainers.data.prepare import TokenSet, prepare
from trainers.data.rows import Rows
from trainers.data.teacher_file import VERSION, Recording
from trainers.data.vocabulary import refuse_other_vocabulary
from trainers.model.load import compute_dtype, load_base, load_model_config
from trainers.objectives.teacher import Frozen
from trainers.run.folder import write_json
from trainers.run.teacher import META, array_paths
from trainers.tools.preflight import check_model, check_positions, check_token_ids, machine_mistakes


class _Recorder:
    """Writes what a teacher predicts for data sets.

    Args:
        config: the student's config; its data, template, temperature and precision are used.
        top_k: tokens that are kept of each label.
    """

    def __init__(self, config: TrainConfig, top_k: int):
        self.config, self.top_k = config, top_k
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        teacher = teacher_config(config)
        with errors_about("model_name_or_path", "teacher"):
            self.model = Frozen(load_base(teacher).to(self.device), compute_dtype(config))
        student = load_model_config(config).get_text_config()
        self.vocab_size = min(int(student.vocab_size), self.model.vocab_size)
        if top_k >= self.vocab_size:
            problem = f"is not below the {self.vocab_size:,} tokens of both models"
            raise ConfigError.about("top_k", top_k, problem, "use 64")

    def check(self, documents: TokenSet) -> None:
        """Raises ConfigError for documents that the teacher cannot read."""
        teacher = teacher_config(self.config)
        with errors_about("model_name_or_path", "teacher"):
            check_token_ids(teacher, [documents], self.model.vocab_size)
            check_positions(teacher, [documents], None)

    def write(self, folder: Path, split: Split, documents: TokenSet) -> int:
        """Writes the arrays of a split; returns the number of its labels.

        Args:
            folder: the folder.
            split: its name.
            documents: its data.
        """
        starts = np.concatenate([[0], np.cumsum(documents.trained)]).astype(np.int64)
        labels, (ids_path, log_probs_path, starts_path) = int(starts[-1]), array_paths(folder, split)
        np.save(starts_path, starts, allow_pickle=False)
        ids = np.lib.format.open_memmap(ids_path, "w+", np.int32, (labels, self.top_k))
        log_probs = np.lib.format.open_memmap(log_probs_path, "w+", np.float32, (labels, self.top_k + 1))
        rows = Rows(documents, self.config.row_tokens, packing=False, objective=self.config.objective_spec)
        order, done, told_tenth = np.argsort(documents.lengths, kind="stable"), 0, 0
        for chosen in np.array_split(order, -(-len(order) // self.config.per_device_eval_batch_size)):
            at = np.concatenate([np.arange(starts[number], starts[number + 1]) for number in chosen])
            for ids_of_chunk, classes, span in self._predicted(rows, chosen):
                ids[at[span]], log_probs[at[span]] = ids_of_chunk, classes
            done += len(at)
            if (tenth := 10 * done // labels) > told_tenth:
                told_tenth = tenth
                print(f"{split}: {10 * tenth}%", file=sys.stderr, flush=True)
        ids.flush()
        log_probs.flush()
        return labels

    def _predicted(self, rows: Rows, chosen: np.ndarray) -> Any:
        """Yields ids, log-probabilities and the span of labels for chunks of the labels of some documents."""
        inputs = rows.collate(chosen).inputs(self.device)
        batch = {name: inputs[name] for name in ("input_ids", "position_ids", "documents", "positions")}
        sizes: dict[str, Any] = {"top_k": self.top_k, "vocab_size": self.vocab_size}
        start = 0
        for top in self.model.top_tokens(**batch, **sizes, temperature=self.config.distill_temperature):
            span = slice(start, start := start + len(top.ids))
            # Where all other tokens have no probability in fp32, the file still holds a finite number.
            yield top.ids.int().cpu().numpy(), top.log_probs.float().clamp(min=-1e4).cpu().numpy(), span


def record(config: TrainConfig, top_k: int, folder: Path) -> dict[str, Any]:
    """Records what the teacher of a config predicts for its data.

    Args:
        config: the config, with a teacher.
        top_k: tokens that are kept of each label.
        folder: an empty folder, to write to.

    Returns:
        `top_k`, `vocab_size`, `labels` by split and `bytes`.

    Raises:
        ConfigError: if model or data cannot be used.
    """
    if mistakes := check_model(teacher_config(config)):
        raise ConfigError(mistakes)
    refuse_other_vocabulary(config)
    data: dict[Split, TokenSet] = {"train": prepare(config, "train")}
    if config.has_evaluation():
        data["eval"] = prepare(config, "eval")
    recorder = _Recorder(config, top_k)
    for documents in data.values():
        recorder.check(documents)
    labels = {split: recorder.write(folder, split, documents) for split, documents in data.items()}
    recording = Recording(
        version=VERSION, teacher=str(config.teacher), top_k=top_k, temperature=config.distill_temperature,
        vocab_size=recorder.vocab_size,
        fingerprints={split: documents.fingerprint for split, documents in data.items()},
    )  # fmt: skip
    write_json(folder / META, recording.model_dump())  # last: without it the folder is none
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {"top_k": top_k, "vocab_size": recorder.vocab_size, "labels": labels, "bytes": size}


def main(argv: list[str]) -> int:
    """Records, and prints a JSON document; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--top_k", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args(argv)
    config = build(read_yaml(args.config))
    try:
        if mistakes := machine_mistakes(config, torch.cuda.is_available()):
            raise ConfigError(mistakes)
        with redirect_stdout(sys.stderr):
            document = record(config, args.top_k, args.folder)
    except ConfigError as error:
        document = {"mistakes": error.as_json()}
    print(json.dumps(document), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
