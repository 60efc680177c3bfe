"""Writes an export as GGUF files, with llama.cpp's own converter and quantiser, and an Ollama `Modelfile`.

The converter is a program in the source of llama.cpp, and the quantiser is in `llama-cpp-python`; both run in processes
of their own. Where that package is installed, each file is read by llama.cpp, and its loss compared with the trainer's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainers.checkpoint.export_check import Probe, tolerance
from trainers.checkpoint.gguf_file import SUFFIX, GgufFile
from trainers.checkpoint.modelfile import MODELFILE, modelfile, turns_of
from trainers.config.gguf_types import CONVERTER, PACKAGE, PLAIN, QUANTISED, GgufRequest, has_llama_cpp
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data.formats import RowError
from trainers.data.template import Encoder
from trainers.data.tokenizer import tokenizer_folder
from trainers.model.load import element_counts, load_model_config, weight_files
from trainers.run.disk import free_bytes
from trainers.run.errors import TrainingError
from trainers.run.folder import read_json, write_json
from trainers.run.host_memory import available
from trainers.run.import_path import child_environment

_OF_DTYPE = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_ROOT = Path(__file__).resolve().parents[2]
_ELSEWHERE = "a newer llama.cpp may; transformers and vLLM load the export without --gguf"


def check_gguf(request: GgufRequest, config: TrainConfig, tokenizer: Any, dtype: torch.dtype, folder: Path) -> None:
    """Checks, before anything is exported, that the converter knows the model and that the disk has room.

    Args:
        request: What to write.
        config: The config that the model is built by.
        tokenizer: Its tokenizer.
        dtype: Dtype of the exported weights.
        folder: An empty folder, which is left empty.

    Raises:
        ConfigError: If it does not know the architecture or the tokenizer, or the files would not fit.
    """
    types = ",".join(request.types)
    if config.objective_spec.scalar_head:
        raise ConfigError.about("--gguf", types, ": this run trained a reward model, which gives scores, not text",
                                "leave --gguf out")  # fmt: skip
    weights = sum(element_counts(weight_files(config)).values())
    needed, free = request.bytes_needed(weights, _OF_DTYPE[dtype]) + weights * dtype.itemsize, free_bytes(folder)
    if free < needed:
        problem = (
            f": the export and these files need up to {needed:,.0f} bytes in {folder.parent}, and {free:,} are free"
        )
        raise ConfigError.about("--gguf", types, problem, "free some, ask for fewer types, or export to another disk")
    model_config = load_model_config(config)
    if not model_config.architectures:
        return  # the exported config has them
    trial = folder / "trial"
    try:
        model_config.save_pretrained(trial)
        tokenizer.save_pretrained(trial)
        _refuse_code(trial, config)
        with _converter_files(trial, config, tokenizer):
            _convert(request, trial, trial / f"vocabulary{SUFFIX}", ["--vocab-only"])
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def write_gguf(
    folder: Path, request: GgufRequest, config: TrainConfig, tokenizer: Any, dtype: torch.dtype, name: str,
    probes: Sequence[Probe], expected: float,
) -> list[GgufFile]:  # fmt: skip
    """Writes the GGUF files of an export and a `Modelfile` beside its weights.

    Args:
        folder: The export, which nobody sees yet.
        request: What to write.
        config: The config that the model is built by.
        tokenizer: Its tokenizer, with the chat template.
        dtype: Dtype of the weights.
        name: Name of the model for the files' metadata.
        probes: The samples that the trainer's loss was computed on.
        expected: That loss.

    Raises:
        ConfigError: If the converter refuses the model.
        TrainingError: If llama.cpp fails, or a file that is not quantised is another model.
    """
    _refuse_code(folder, config)
    source = request.source(_OF_DTYPE[dtype])
    plain = list(dict.fromkeys([*source, *(kind for kind in request.types if kind in PLAIN)]))
    encoder = _encoder(tokenizer)
    beginning = _beginning(tokenizer, encoder, probes)
    flags = ["--no_bos"] if beginning.get("add_bos_token") is False else []
    facts, files = dict[str, dict[str, Any]](), dict[str, GgufFile]()
    sample = folder / "probes.json"
    write_json(sample, _sample(tokenizer, encoder, probes))
    for kind in [*plain, *(kind for kind in request.types if kind in QUANTISED)]:
        path = folder / f"model-{kind.upper()}{SUFFIX}"
        if kind in PLAIN:
            with _converter_files(folder, config, tokenizer, beginning):
                _convert(request, folder, path, ["--outtype", kind, "--model-name", name])
        else:
            _call("quantise", str(folder / f"model-{source[0].upper()}{SUFFIX}"), str(path), kind)
        examined = _call("examine", str(path), str(request.llama_cpp / "gguf-py"), *flags)
        files[kind] = _measured(GgufFile(path.name, kind, examined["matrices"]), path, sample, probes, expected)
        facts[kind] = examined
        if kind in PLAIN:
            _refuse_other(files[kind], expected, probes)
    sample.unlink()
    for kind in set(plain) - set(request.types):
        (folder / files.pop(kind).name).unlink()
    written = [files[kind] for kind in request.types]
    adds_bos = facts[request.types[0]]["add_bos"]
    (folder / MODELFILE).write_text(_modelfile(folder, written, tokenizer, encoder, adds_bos), encoding="utf-8")
    return written


def _refuse_code(folder: Path, config: TrainConfig) -> None:
    """Raises ConfigError for a model with code of its own, which the converter would run unasked."""
    for path in folder.glob("*.json"):
        if "auto_map" in (read_json(path) or {}) and not config.trust_remote_code:
            problem = f": {path.name} names code of the model's own (auto_map), which the converter would run"
            raise ConfigError.about("--gguf", None, problem, "leave --gguf out, or train with trust_remote_code=true")


@contextmanager
def _converter_files(
    folder: Path, config: TrainConfig, tokenizer: Any, beginning: Mapping[str, bool] | None = None
) -> Iterator[None]:
    """Completes a model folder with what the converter reads of older versions of transformers.

    That is the base model's `tokenizer.model`, if there is one, with the scores by which llama.cpp joins tokens; the
    list of added tokens: without it, those of a chat template would be plain text; and what `_beginning` says.
    """
    source, target = tokenizer_folder(config) / "tokenizer.model", folder / "tokenizer.model"
    is_needed = source.is_file() and not target.exists()
    if is_needed:
        shutil.copyfile(source, target)
    described = folder / "tokenizer_config.json"
    original = described.read_bytes()
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    added = {
        str(number): {name: getattr(token, name) for name in names}
        for number, token in tokenizer.added_tokens_decoder.items()
    }
    write_json(described, {**(read_json(described) or {}), "added_tokens_decoder": added, **(beginning or {})})
    try:
        yield
    finally:
        described.write_bytes(original)
        if is_needed:
            target.unlink()


def _encoder(tokenizer: Any) -> Encoder | None:
    """The chat template; None without one."""
    return Encoder.of(tokenizer, assistant_only=False) if tokenizer.chat_template else None


def _prompt(encoder: Encoder | None, text: str) -> str | None:
    """A user's message with what leads to a reply; None without a template, or if that refuses it."""
    try:
        return encoder.render([{"role": "user", "content": text}], prompt=True) if encoder is not None else None
    except (ConfigError, RowError):
        return None


def _beginning(tokenizer: Any, encoder: Encoder | None, probes: Sequence[Probe]) -> dict[str, bool]:
    """How conversations begin, for which llama.cpp has defaults by the kind of tokenizer; empty without a template.

    Returns:
        Keys of `tokenizer_config.json`: `add_bos_token`, whether with the BOS token; `add_prefix_space`, false if text
        gets no space after a special token. llama.cpp puts one there where it also puts one before a first text.
    """
    if (prompt := _prompt(encoder, "Hi")) is None:
        return {}
    bos, keys = tokenizer.bos_token, dict[str, bool]()
    if bos is not None:
        trained_with = any(probe.ids[0, 0] == tokenizer.bos_token_id for probe in probes)
        keys["add_bos_token"] = trained_with or prompt.startswith(bos)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    special = tokenizer.added_tokens_decoder
    if ids and ids[0] in special:
        alone, after = (
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a", special[ids[0]].content + "a")
        )
        keys |= {"add_prefix_space": False} if after[1:] != alone else {}
    return keys


def _sample(tokenizer: Any, encoder: Encoder | None, probes: Sequence[Probe]) -> dict[str, Any]:
    """What `measure` in `llama_cpp.py` reads."""
    documents = [{"ids": probe.ids[0].tolist(), "positions": probe.positions.tolist()} for probe in probes]
    texts = [tokenizer.decode(document["ids"]) for document in documents]
    if (prompt := _prompt(encoder, "It's 1234 °C,\n\nzwölf\tHUNDRED 日本 🙂!")) is not None:
        texts.append(prompt)
    pairs = [(text, tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    return {"documents": documents, "texts": pairs}


def _measured(file: GgufFile, path: Path, sample: Path, probes: Sequence[Probe], expected: float) -> GgufFile:
    """The file with its loss, where llama.cpp can be called and has the memory."""
    if not has_llama_cpp() or path.stat().st_size > available():
        return file
    result = _call("measure", str(path), str(sample))
    return replace(file, trainer_loss=expected, **result)


def _refuse_other(file: GgufFile, expected: float, probes: Sequence[Probe]) -> None:
    """Raises TrainingError if a file that is not quantised is not the trained model."""
    limit = tolerance(expected, sum(len(probe.positions) for probe in probes), torch.bfloat16)
    if file.difference is not None and not abs(file.difference) <= limit:  # NaN fails
        raise TrainingError(
            f"{file}; that is more than {limit:.1e} apart, so llama.cpp computes another model; nothing was written. "
            "Export without --gguf, or use another version of llama.cpp"
        )


def _modelfile(folder: Path, files: Sequence[GgufFile], tokenizer: Any, encoder: Encoder | None, adds_bos: bool) -> str:
    sampling = read_json(folder / "generation_config.json") or {}
    ends = sampling.get("eos_token_id")
    stops = tokenizer.convert_ids_to_tokens(ends if isinstance(ends, list) else [ends] if ends is not None else [])
    turns = turns_of(partial(encoder.render, prompt=True)) if encoder else None
    first, *others = sorted((file.name for file in files), key=lambda name: (folder / name).stat().st_size)
    begin = tokenizer.bos_token if adds_bos and tokenizer.bos_token else ""
    return modelfile(first, others, turns, begin, stops, sampling)


def _convert(request: GgufRequest, folder: Path, target: Path, options: Sequence[str]) -> None:
    """Runs llama.cpp's converter.

    Raises:
        ConfigError: If it does not know the model.
        TrainingError: If it fails otherwise.
    """
    argv = [sys.executable, str(request.llama_cpp / CONVERTER), *options, "--outfile", str(target), str(folder)]
    status, _, errors = _run(argv, request.llama_cpp)
    if status == 0 and target.is_file():
        return
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or [f"status {status}"]
    types, arch = (
        ",".join(request.types),
        ", ".join((read_json(folder / "config.json") or {}).get("architectures") or []),
    )
    if any(line.endswith("is not supported") for line in lines):
        raise ConfigError.about("--gguf", types, f": llama.cpp's converter does not know {arch}", _ELSEWHERE)
    if "pre-tokenizer was not recognized" in lines[-1]:
        problem = f": llama.cpp's converter does not know the tokenizer of this {arch}, which must be a published one"
        raise ConfigError.about("--gguf", types, problem, _ELSEWHERE)
    if lines[-1].startswith(("ModuleNotFoundError", "ImportError")):
        raise ConfigError.about("--gguf", types, f": llama.cpp's converter fails with {lines[-1]}",
                                "install what it needs")  # fmt: skip
    raise TrainingError(f"llama.cpp's converter failed: {lines[-1][:300]}")


def _call(*arguments: str) -> dict[str, Any]:
    """Calls llama.cpp in a process of its own; returns what it prints.

    Raises:
        TrainingError: If that process fails.
    """
    status, printed, errors = _run([sys.executable, "-P", "-m", "trainers.checkpoint.llama_cpp", *arguments], _ROOT)
    if status == 0:
        document: dict[str, Any] = json.loads(printed.splitlines()[-1])
        return document
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["no message"]
    signal = f" (ended by signal {-status})" if status < 0 else ""
    raise TrainingError(
        f"llama.cpp ({PACKAGE}) cannot {arguments[0]} {Path(arguments[1]).name}{signal}: {lines[-1][:300]}"
    )


def _run(argv: Sequence[str], root: Path) -> tuple[int, str, str]:
    """Runs a program that imports from `root`; returns its exit status, output and errors."""
    # It finds everything in the folder, and is not to ask the Hub.
    environment = {**child_environment(os.environ, str(root)), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          encoding="utf-8", errors="replace", cwd=_ROOT, check=False)  # fmt: skip
    return done.returncode, done.stdout, done.stderr
