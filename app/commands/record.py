"""The verb `record`: keeps what a teacher predicts, so that runs can learn from it without loading the teacher."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.accelerate_launch import ROOT, module_argv, module_environment
from app.command_line import Verb
from app.console import clean, counted, report, report_json, say
from app.launch.foreground import run_program
from app.launch.job import named_preset
from trainers.config.byte_text import byte_text
from trainers.config.command_line import option
from trainers.config.fields import text_of
from trainers.config.local_paths import absolute_paths
from trainers.config.mistakes import ConfigError, Mistake, Mistakes
from trainers.config.options import TrainConfig
from trainers.config.parse import Request, dump_yaml, whole_number
from trainers.run.from_run import resolve_request

DEFAULT_TOP_K, _MOST_TOP_K = 64, 4096
RECORD = Verb(
    "record",
    "Record what a teacher predicts at each token that the same options would train, so that `train --objective "
    "distill --teacher_log_probs FOLDER` learns from it without loading the teacher. One process, on the first GPU.",
    own={
        "top_k": option("top_k", "<int>", f"Most likely tokens to keep of each token; default: {DEFAULT_TOP_K}."),
        "folder": option("folder", "<dir>", "Folder to write; it must be new or empty."),
    },
    launch=(),
)


def record_verb(argv: Sequence[str]) -> int:
    """`tunesmith record`: returns the exit status.

    Raises:
        ConfigError: for an invalid request, or a teacher that cannot be used.
        RuntimeError: if the program that records has died.
    """
    args = RECORD.read(argv)
    if args is None:
        return 0
    mistakes, request = Mistakes(), args.request
    request.preset = named_preset(args.names, request.preset, mistakes)
    top_k = whole_number(str(args.own.get("top_k", DEFAULT_TOP_K)), 1, _MOST_TOP_K)
    if top_k is None:
        remedy = f"give a number from 1 to {_MOST_TOP_K}"
        mistakes.append(Mistake("top_k", repr(str(args.own["top_k"])[:40]), "is not a valid number of tokens", remedy))
    if (folder := args.own.get("folder")) is None:
        mistakes.append(Mistake("folder", None, "is not set", "name the folder to write: --folder DIR"))
    config = None
    with mistakes:
        config = resolve_request(request)
        if config.objective == "sft" and "objective" not in request.chosen:  # of a preset for it, or by default
            request.options["objective"] = "distill"
            config = resolve_request(request)
        config = absolute_paths(config)
        if not config.objective_spec.teacher or config.teacher is None:
            problem = f"with objective={config.objective}: only a teacher is recorded"
            raise ConfigError.about("teacher", config.teacher, problem, "set objective=distill and a teacher")
    mistakes.refuse()
    assert config is not None
    assert top_k is not None
    for line in request.notes:
        say(clean(line))
    return _record(request, config, top_k, Path(str(folder)).expanduser().absolute(), "json" in args.switches)


def _record(request: Request, config: TrainConfig, top_k: int, folder: Path, as_json: bool) -> int:
    _refuse_used(folder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")  # a part of a recording is of no use
    say(f"recording the {counted(top_k, 'most likely token', 'most likely tokens')} of {config.teacher} in {folder}")
    try:
        temporary.mkdir(parents=True)
        document = _run(config, top_k, temporary)
        temporary.rename(folder)
    except OSError as error:
        raise _unwritable(folder, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    document["folder"] = str(folder)
    if as_json:
        report_json(document)
        return 0
    labels = " and ".join(f"{count:,} of {split}" for split, count in document["labels"].items())
    report(f"recorded what it predicts at each trained token, {labels}: {byte_text(document['bytes'])}")
    report(f"next: tunesmith train {_options(request, folder)}")
    return 0


def _options(request: Request, folder: Path) -> str:
    """The options of the request as a command line, with the recording in place of the teacher."""
    options = {**request.options, "objective": "distill", "teacher_log_probs": str(folder)}
    chosen = {name: value for name, value in options.items() if name != "teacher"}
    files = {"config": request.config} if request.config else {}
    pairs = [f"--{name} {shlex.quote(text_of(value) or 'none')}" for name, value in {**files, **chosen}.items()]
    return " ".join([*([request.preset] if request.preset else []), *pairs])


def _run(config: TrainConfig, top_k: int, folder: Path) -> dict[str, Any]:
    """Runs the program that records; returns its document.

    Raises:
        ConfigError: if teacher or data cannot be used.
        RuntimeError: if the program has died.
    """
    with tempfile.TemporaryDirectory() as temporary:
        (path := Path(temporary) / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
        argv = ["--config", str(path), "--top_k", str(top_k), "--folder", str(folder)]
        program = module_argv("trainers.tools.record_teacher", argv)
        status, out, _ = run_program(program, module_environment(), cwd=ROOT, show_errors=True)
    if status != 0:
        raise RuntimeError(f"recording failed with exit status {status}")
    document: dict[str, Any] = json.loads(out)
    if "mistakes" in document:
        raise ConfigError.from_json(document["mistakes"])
    return document


def _refuse_used(folder: Path) -> None:
    """Raises ConfigError for a folder that holds anything, or for a file."""
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError.about("folder", str(folder), "is not empty", "name another one")
    except OSError as error:
        raise _unwritable(folder, error) from None


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError.about("folder", str(folder), f"cannot be written: {error.strerror or error}", "name another one")
