"""Plans what `tunesmith merge` merges: the models, the method and its numbers, and where the result goes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from app.command_line import Args, Verb
from app.console import shortened
from app.launch.actions import refuse_target
from app.merge.bases import Base, shared_base
from app.runs.runs import config_values, find_run
from app.services.chat import weights_of
from app.services.model_names import NamedModel, named_model
from trainers.config.command_line import option, switch
from trainers.config.mistakes import ConfigError, Mistake, Mistakes
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.config.parse import whole_number
from trainers.embedded import BASE_DIR
from trainers.run.disk import free_bytes, local_tensors
from trainers.run.folder import RunFolder
from trainers.run.from_run import ADAPTER_WEIGHTS
from trainers.run.merging import (
    CAT,
    DTYPES,
    FULL_METHODS,
    LINEAR,
    METHODS,
    RANK_METHODS,
    MergedModel,
    MergeRequest,
    default_weight,
    draws,
    prunes,
)
from trainers.run.weight_headers import read_headers

_CHOSEN = frozenset({"method", "output_dir", "seed", "runs_dir", "dataset_name"})
_MOST_MODELS, _MOST_SEED, _MOST_RANK = 64, 2**32 - 1, 65536
_FULL_BYTES, _SPARE = 8, 2**27
"""Bytes of a merged weight on disk: in fp32, in its file and in one without a name. Bytes for the other files."""
MERGE = Verb(
    "merge",
    "Merge runs or model folders that were trained from one base into one model, or average checkpoints of a run: "
    "adapters become an adapter, full weights become full weights. docs/merging.md says which method does what. "
    "Exit status: 0 merged, 1 it failed, 130 interrupted, 2 invalid request.",
    ("models", "Runs, RUN@WEIGHTS (a checkpoint such as step-00000100, or an export), or model folders."),
    own={
        "method": option("method", "<name>", f"{', '.join(METHODS)}; default: {CAT} for adapters, {LINEAR} for full "
                         "weights, which also have ties, dare_linear and dare_ties."),
        "weights": option("weights", "<a,b,c>", "Weight of each model; default: those of the mean."),
        "density": option("density", "<float>", "Share of the values that ties and dare methods keep, such as 0.5."),
        "seed": option("seed", "<int>", "Seed of the dare methods; default: 0."),
        "rank": option("rank", "<int>", "Rank of the result of svd methods; default: the largest of the adapters."),
        "checkpoints": option("checkpoints", "<list>", "Average checkpoints of the one run: last:3, all, or their "
                              "names or steps, such as 100,200."),
        "base": option("base", "<model>", "Base of full weights; default: what their runs started from."),
        "dtype": option("dtype", "<dtype>", "float32, bfloat16 or float16; default: that of the first model; of "
                        "checkpoints, that of their base; of adapters, float32."),
        "output_dir": option("output_dir", "<dir>", "Folder to write; it must be new or empty."),
        "eval": switch("eval", "Then compare the models and the result as `tunesmith eval` does."),
        "dataset_name": option("dataset_name", "<name|path>", "Rows for --eval; default: those of the first run."),
        "runs_dir": option("runs_dir", "<dir>", "Parent folder of run folders."),
    },
    launch=(),
    hidden={*TrainConfig.model_fields, "config"} - _CHOSEN,
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Everything that `merge` will do.

    Args:
        models: what is merged.
        names: as they are named on the command line of `eval`.
        weights: weight of each.
        kind: `adapter` or `full`.
        base: the base model; None if it is unknown and not needed.
        target: the folder to write.
        options: further fields of `MergeRequest`.
        runs_dir: folder of run folders.
        evaluates: whether to compare the models afterwards.
        rows: name or path of the rows for that; None for those of the first run.
    """

    models: list[NamedModel]
    names: list[str]
    weights: list[float]
    kind: str
    base: Base | None
    target: Path
    options: Mapping[str, Any]
    runs_dir: Path
    evaluates: bool = False
    rows: str | None = None

    def request(self, folders: Sequence[Path]) -> MergeRequest:
        """The request to the program that merges.

        Args:
            folders: of each model the folder with its weights.
        """
        models = [
            MergedModel(model.label, str(folder), weight)
            for model, folder, weight in zip(self.models, folders, self.weights, strict=True)
        ]
        base = self.base or Base("")
        return MergeRequest(models, is_adapter=self.kind == "adapter", base=base.name, revision=base.revision or "",
                            title=self.target.name, **self.options)  # fmt: skip

    def eval_argv(self, result: bool) -> list[str]:
        """The command line of `tunesmith eval`.

        Args:
            result: whether the result is one of the models.
        """
        rows = ["--dataset_name", self.rows] if self.rows else []
        return [*self.names, *([str(self.target)] if result else []), "--runs_dir", str(self.runs_dir), *rows]


def make_plan(args: Args, argv: Sequence[str]) -> Plan:
    """Makes the plan of a command line.

    Raises:
        ConfigError: with all mistakes at once.
    """
    chosen = dict(args.request.options)
    mistakes = Mistakes([*args.request.mistakes, *_unread(args)])
    runs_dir = Path(str(chosen.get("runs_dir", TrainConfig.model_fields["runs_dir"].default))).expanduser()
    target = Path()
    with mistakes:
        target = _target(chosen)
    names, models = list(args.names), list[NamedModel]()
    with mistakes:
        names = _names(args, runs_dir)
        models = _distinct([_model(name, runs_dir) for name in names])
        _refuse_twice(names, models)
    mistakes.refuse()
    kinds = {model.label: _kind(model) for model in models}
    kind = next(iter(kinds.values()))
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{label} ({each})" for label, each in kinds.items())
        raise ConfigError(f"adapters and full weights cannot be merged with each other: {listed}; export the adapters "
                          "with `tunesmith export RUN --merged`, and name their folders")  # fmt: skip
    method = str(chosen.get("method", CAT if kind == "adapter" else LINEAR))
    _check_method(method, kind)
    numbers: dict[str, Any] = {}
    with mistakes:
        numbers["density"] = _density(args.own.get("density"), method)
    with mistakes:
        numbers["seed"] = _seed(chosen.get("seed"), method)
    with mistakes:
        numbers["rank"] = _rank(args.own.get("rank"), method)
    weights = [default_weight(method, len(models))] * len(models)
    with mistakes:
        weights = _weights(args.own.get("weights"), models, weights)
    dtype = str(args.own.get("dtype", "auto"))
    if dtype not in DTYPES:
        mistakes.append(Mistake("--dtype", shortened(dtype), "is not a valid value", f"use {', '.join(DTYPES)}"))
    mistakes.refuse()
    needed = kind == "full" and (method != LINEAR or not math.isclose(sum(weights), 1, abs_tol=1e-9))
    base = shared_base(models, kind, args.own.get("base"), runs_dir, needed)
    options = {"method": method, "dtype": dtype, "needs_base": needed, "command": ["tunesmith", "merge", *argv],
               "like_base": any(model.folder is None for model in models), **numbers}  # fmt: skip
    rows = chosen.get("dataset_name")
    plan = Plan(models, names, weights, kind, base, target, options, runs_dir, "eval" in args.own,
                str(rows) if rows else None)  # fmt: skip
    _check_room(plan)
    return plan


def _unread(args: Args) -> list[Mistake]:
    """A mistake for each option or switch that a merge does not read."""
    unread = ("has no part in a merge", "leave it out")
    of_eval = [] if "eval" in args.own or "dataset_name" not in args.request.options else [
        Mistake("dataset_name", None, "has no effect without --eval", "add --eval, or leave it out")
    ]  # fmt: skip
    return [
        *(Mistake(name, None, *unread) for name in sorted(args.request.options.keys() - _CHOSEN)),
        *([Mistake("config", None, *unread)] if args.request.config else []),
        *(Mistake(name, value, *unread) for name, value in sorted(args.launch.items())),
        *(Mistake(f"--{name}", None, *unread) for name in sorted(args.switches - {"json", "quiet"})),
        *of_eval,
    ]


def _target(chosen: Mapping[str, Any]) -> Path:
    name = str(chosen.get("output_dir") or "").strip()
    if not name:
        raise ConfigError.about("output_dir", None, "is missing", "name the folder to write: --output_dir DIR")
    target = Path(os.path.normpath(Path(name).expanduser().absolute()))
    refuse_target(target, "output_dir")
    return target


def _names(args: Args, runs_dir: Path) -> list[str]:
    """The names of the models; with `--checkpoints`, those of the checkpoints of the one run."""
    text = args.own.get("checkpoints")
    if text is None:
        if len(args.names) < 2:
            number = "only one" if args.names else "no"
            raise ConfigError(f"there is {number} model to merge; name at least two, or a run and --checkpoints last:3")
        names = list(args.names)
    else:
        if len(args.names) != 1:
            raise ConfigError.about("--checkpoints", text, f"with {len(args.names)} models", "name one run")
        names = [f"{args.names[0]}@{name}" for name in _checkpoints(str(text), find_run(args.names[0], runs_dir))]
    if len(names) > _MOST_MODELS:
        raise ConfigError(f"there are {len(names)} models to merge; name at most {_MOST_MODELS}")
    return names


def _checkpoints(text: str, run: RunFolder) -> list[str]:
    """The checkpoints of a run that `--checkpoints` names, oldest first."""
    present = sorted(name for name in weights_of(run) if name.startswith("step-"))
    listed = ", ".join(present) or "none"
    last = re.fullmatch(r"last:([0-9]{1,6})", text.strip(), re.ASCII)
    if text.strip() == "all" or last:
        names = present if last is None else present[-int(last[1]) :] if int(last[1]) else []
        short = last is not None and len(present) < int(last[1])
    else:
        parts = [part.strip() for part in text.split(",")]
        names = [f"step-{int(part):08d}" if part.isascii() and part.isdigit() and len(part) < 9 else part
                 for part in parts]  # fmt: skip
        short = not set(names) <= set(present)
    if short or len(set(names)) < 2:
        problem = f": run {run.id} has the checkpoints {listed}" if short else "names fewer than two checkpoints"
        raise ConfigError.about("--checkpoints", shortened(text), problem, "write last:3, all, or steps such as "
                                "100,200; --save_total_limit says how many a run keeps")  # fmt: skip
    return names


def _model(name: str, runs_dir: Path) -> NamedModel:
    model = named_model(name, runs_dir)
    if model.label == EMBEDDED and model.run is None and model.folder is None:
        return NamedModel(EMBEDDED, folder=BASE_DIR)
    if model.run is None and model.folder is None:
        remedy = f"download it with `hf download {name} --local-dir DIR`, and name the folder"
        raise ConfigError(f"{shortened(name)} is no run and no folder; {remedy}")
    return model


def _distinct(models: Sequence[NamedModel]) -> list[NamedModel]:
    """The models with labels that tell them apart."""
    own, used, distinct = {model.label for model in models}, set[str](), list[NamedModel]()
    for model in models:
        others = (f"{model.label} {number}" for number in count(2))
        free = (name for name in others if name not in own and name not in used)
        label = next(free) if model.label in used else model.label
        used.add(label)
        distinct.append(replace(model, label=label))
    return distinct


def _refuse_twice(names: Sequence[str], models: Sequence[NamedModel]) -> None:
    """Raises ConfigError for a model that is named twice: it would count double."""
    seen: dict[Any, str] = {}
    for name, model in zip(names, models, strict=True):
        key = model.folder.resolve() if model.folder else (model.run and model.run.path.resolve(), model.weights)
        if key in seen:
            raise ConfigError(f"{name} and {seen[key]} are the same weights; name them once, and use --weights")
        seen[key] = name


def _kind(model: NamedModel) -> str:
    if model.folder is not None:
        return "adapter" if model.is_adapter else "full"
    assert model.run is not None
    return "full" if config_values(model.run).get("method") == "full" else "adapter"


def _check_method(method: str, kind: str) -> None:
    """Raises ConfigError for a method that does not exist, or not for these models."""
    fitting = tuple(METHODS) if kind == "adapter" else FULL_METHODS
    if method not in fitting:
        problem = "merges adapters only, and these are full weights" if method in METHODS else "is not a merging method"
        raise ConfigError.about("--method", shortened(method), problem, f"use {', '.join(fitting)}")


def _real(text: Any) -> float | None:
    try:
        number = float(str(text))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _weights(text: Any, models: Sequence[NamedModel], default: list[float]) -> list[float]:
    if text is None:
        return default
    parts = [part.strip() for part in str(text).split(",")]
    numbers = [number for part in parts if (number := _real(part)) is not None and abs(number) <= 1e6]
    quoted = shortened(str(text))
    if len(numbers) < len(parts):
        raise ConfigError.about("--weights", quoted, "is not a list of numbers", "write numbers with commas between")
    if len(numbers) != len(models):
        labels = ", ".join(model.label for model in models)
        problem = f"has {len(numbers)} numbers for {len(models)} models ({labels})"
        raise ConfigError.about("--weights", quoted, problem, "write one for each, in their order")
    if not any(numbers):
        raise ConfigError.about("--weights", quoted, "has only zeros, which makes the base", "write other numbers")
    return numbers


def _density(text: Any, method: str) -> float | None:
    if not prunes(method):
        if text is not None:
            problem = f"does not apply to method={method}, which keeps all values"
            raise ConfigError.about("--density", shortened(str(text)), problem, "leave it out")
        return None
    if text is None:
        raise ConfigError.about("--density", None, f"is missing: method={method} keeps a share of the values",
                                "write a share above 0, such as --density 0.5")  # fmt: skip
    number = _real(text)
    if number is None or not 0 < number <= 1:
        raise ConfigError.about("--density", shortened(str(text)), "is not a share", "write a number above 0, up to 1")
    return number


def _seed(text: Any, method: str) -> int:
    if text is not None and not draws(method):
        raise ConfigError.about("--seed", shortened(str(text)), f"does not apply to method={method}, which draws no "
                                "numbers", "leave it out")  # fmt: skip
    return _whole_number("--seed", "0" if text is None else text, 0, _MOST_SEED)


def _rank(text: Any, method: str) -> int | None:
    if text is None:
        return None
    if method not in RANK_METHODS:
        problem = f"does not apply to method={method}, whose rank follows from the adapters"
        raise ConfigError.about("--rank", shortened(str(text)), problem, f"leave it out, or use {RANK_METHODS[0]}")
    return _whole_number("--rank", text, 1, _MOST_RANK)


def _whole_number(name: str, text: Any, least: int, most: int) -> int:
    if (number := whole_number(str(text), least, most)) is None:
        raise ConfigError.about(name, shortened(str(text)), "is not a valid whole number", f"write {least} to {most}")
    return number


def _check_room(plan: Plan) -> None:
    """Raises ConfigError if the disk of the target has too little room for the result and what is exported before."""
    checkpoints = sum(model.folder is None for model in plan.models)
    if plan.kind == "full":
        weights = max((_count_weights(model) for model in plan.models), default=0)
        needed = weights * (_FULL_BYTES + 4 * checkpoints)
    else:
        files = [_adapter_bytes(model) for model in plan.models]
        needed = 4 * sum(files)
    needed, free = needed + _SPARE, free_bytes(plan.target.parent)
    if free < needed:
        problem = f": this merge needs up to {needed:,} bytes while it runs, and {free:,} are free"
        raise ConfigError.about("output_dir", plan.target, problem, "free some, or choose another folder")


def _count_weights(model: NamedModel) -> int:
    """The number of full weights; of a checkpoint, those of its base, or 0 if that is not on this machine."""
    if model.folder is not None:
        return sum(math.prod(shape) for _, shape in read_headers(model.folder).values())
    assert model.run is not None
    values = config_values(model.run)
    name = str(values.get("model_name_or_path"))
    tensors = local_tensors(TrainConfig(model_name_or_path=name, dataset_name=EMBEDDED))
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _adapter_bytes(model: NamedModel) -> int:
    if model.folder is not None:
        return (model.folder / ADAPTER_WEIGHTS).stat().st_size
    assert model.run is not None
    assert model.weights is not None
    return sum(path.stat().st_size for path in (model.run.checkpoints / model.weights).glob("*.safetensors"))
