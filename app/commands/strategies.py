"""The verb `strategies`: lists them, describes one, and imports a DeepSpeed JSON as a new one."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from app.commands.runs import catalog
from app.console import clean, report, report_json, say, shortened, show_table
from app.services.deepspeed_import import ImportedStrategy, import_deepspeed
from app.services.strategy_text import describe
from trainers.config.mistakes import ConfigError
from trainers.config.parse import whole_number
from trainers.strategy.deepspeed_rules import read_json
from trainers.strategy.schema import MAX_PROCESSES
from trainers.strategy.strategy import load_strategy, strategy_names

_STEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def strategies_verb(name: str | None, file: str | None, num_processes: str | None, output: Path | None,
                    as_json: bool) -> int:  # fmt: skip
    """`tunesmith strategies`.

    Raises:
        ConfigError: for an unknown strategy, or a file that cannot be imported.
    """
    if name == "import":
        if file is None:
            raise ConfigError("strategies import needs a file; write: tunesmith strategies import ds_config.json")
        return _import(file, num_processes, output, as_json)
    unused = {"FILE": file, "--num_processes": num_processes, "--output": output}
    for option, value in unused.items():
        if value is not None:
            raise ConfigError.about(option, shortened(str(value)), "is for `strategies import`", "leave it out")
    if name is None:
        return catalog([{"name": each, "summary": load_strategy(each).summary} for each in strategy_names()], as_json)
    return _show(name, describe(name), as_json)


def _show(name: str, about: dict[str, Any], as_json: bool) -> int:
    if as_json:
        report_json(about)
        return 0
    lines = [f"{about['name']}: {about['summary']}", "", *about["about"], ""]
    lines += [f"{axis['axis']} {axis['size']}  {axis['meaning']}" for axis in about["axes"]]
    lines += ["", *about["picture"], "", "A rank holds, beside activations (for 7 billion trained parameters):"]
    lines += [f"  {row['use']:<10} {row['formula']} = {row['gb']:.1f} GB" for row in about["memory"]]
    lines += ["", "A rank passes to each collective in a step:"]
    lines += [f"  {row['collective']:<15} {row['formula']}" for row in about["traffic"]] or ["  nothing"]
    lines += ["", f"Start it: tunesmith train PRESET --strategy {shlex.quote(name)}"]
    report(clean("\n".join(lines)))
    return 0


def _import(file: str, num_processes: str | None, output: Path | None, as_json: bool) -> int:
    """Writes the files of an imported strategy, and shows what became of each key.

    Raises:
        ConfigError: if the JSON cannot be imported, or a file exists already.
    """
    processes = None
    if num_processes is not None and (processes := whole_number(num_processes, 1, MAX_PROCESSES)) is None:
        problem = f"is not a number of processes from 1 to {MAX_PROCESSES}"
        raise ConfigError.about("num_processes", shortened(num_processes), problem, "write e.g. 8")
    try:
        imported = import_deepspeed(read_json(file), processes)
    except ConfigError as error:
        raise ConfigError(error.mistakes, shortened(file)) from None
    paths = _paths(file, output)
    if existing := [path for path in paths.values() if path.exists() or path.is_symlink()]:
        raise ConfigError.about("output", existing[0], "exists", "use --output OTHER.yaml")
    written = _write(imported, paths, Path(file).name)
    command = shlex.join(["tunesmith", "train", "PRESET", "--config", str(paths["options"]),
                          "--strategy", str(paths["strategy"])])  # fmt: skip
    if as_json:
        report_json({"files": {name: str(path) for name, path in written.items()}, "options": imported.options,
                     "keys": [asdict(moved) for moved in imported.keys], "command": command})  # fmt: skip
        return 0
    rows = [[moved.key, shortened(json.dumps(moved.value)), moved.target, moved.note] for moved in imported.keys]
    show_table(["key", "value", "became", "what"], [[clean(cell) for cell in row] for row in rows])
    for name, path in written.items():
        say(f"wrote {clean(str(path))} ({name})")
    report(clean(f"start it: {command}"))
    return 0


def _paths(file: str, output: Path | None) -> dict[str, Path]:
    """The files to write, beside each other."""
    if output is None:
        stem = Path(file).stem
        output = Path(f"{stem}.yaml")
        if not _STEM.fullmatch(stem):
            raise ConfigError.about("FILE", shortened(file), "has no plain name to use", "add --output NAME.yaml")
    if output.suffix not in (".yaml", ".yml"):
        raise ConfigError.about("output", shortened(str(output)), "is not a YAML file", "write e.g. --output mine.yaml")
    if output.stem in strategy_names():
        raise ConfigError.about("output", output, "has the name of a strategy that ships", "use another name")
    base = output.with_suffix("")
    return {"strategy": output, "json": Path(f"{base}-deepspeed.json"), "options": Path(f"{base}-options.yaml")}


def _write(imported: ImportedStrategy, paths: dict[str, Path], source: str) -> dict[str, Path]:
    """Writes the files that are needed, and checks the strategy as a launch does.

    Raises:
        ConfigError: if the strategy is refused after all, or a file cannot be written; nothing is left then.
    """
    values, written = dict(imported.accelerate), dict(paths)
    if imported.deepspeed:
        values["deepspeed_config"] = {
            "deepspeed_config_file": str(paths["json"].absolute()),
            **values["deepspeed_config"],
        }
    else:
        del written["json"]
    name = "".join(letter for letter in source if letter.isprintable())
    texts = {
        "strategy": f"# {values['distributed_type']}, imported from {name}\n{yaml.safe_dump(values, sort_keys=False)}",
        "json": json.dumps(imported.deepspeed, indent=2) + "\n",
        "options": f"# Options of {name}\n{yaml.safe_dump(imported.options, sort_keys=False)}",
    }
    created: list[Path] = []
    try:
        for kind, file in reversed(written.items()):
            with open(file, "x", encoding="utf-8") as target:
                created.append(file)
                target.write(texts[kind])
        load_strategy(str(paths["strategy"]))
    except (OSError, ConfigError) as error:
        for file in created:
            file.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ConfigError.about("output", paths["strategy"], f"cannot be written: {error.strerror}") from None
        raise
    return written
