"""The model card of an export: what was trained on what, how, with which result, and how to repeat it.

It is written to be published, so it has no path of this machine: a local file or folder is named by its last part.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import yaml

from trainers.config.fields import text_of
from trainers.config.mistakes import ConfigError
from trainers.config.mix import Mix, read_mix
from trainers.config.objective_file import short_name
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.config.remote_data import is_url
from trainers.run.compatibility import PLACES, versions
from trainers.run.folder import RunFolder
from trainers.run.json_file import parse_json
from trainers.run.lineage import Stage, as_stages, in_words, stages_of
from trainers.run.log import without_secrets
from trainers.run.merging import CAT, METHODS, Merge
from trainers.strategy.strategy import load_strategy, strategy_names

_PRIVATE = frozenset({
    *PLACES, "preset", "run_name", "cache_dir", "checkpoint_url", "sampler_url", "report_to", "from_run",
})  # fmt: skip
"""Options that say where a run stands and what it reports to; what they mean for the model is said elsewhere."""
_PUBLIC_SCHEMES = ("http", "https", "hf")
_FOLLOW = ("model_name_or_path", "model_revision", "random_init")
"""Options that follow from `from_run`."""
_SIZES = ("pp", "dp_replicate", "cp", "sp", "tp", "ep")


@dataclass(frozen=True)
class History:
    """How weights came to be, beside their options.

    Args:
        stages: The runs that led to them, in order.
        strategy: Name of the strategy; empty if unknown.
        processes: Number of processes; 0 if unknown.
        sizes: Sizes of the mesh above 1, such as `{"tp": 2}`.
        base: Digest of the frozen base weights; empty if there are none.
        revision: Commit of a base model on the Hub; empty if unknown.
        data: Fingerprint of the training data, as it was read and tokenized; empty if unknown.
        versions: Of the packages that trained them.
        before, after: Metrics of the evaluation data before the first step, and of these weights.
        mix: Path of the run's copy of its mix of data; empty without one.
        stop_at_step: The step at which a repetition is stopped; None if it ends by itself.
        export: Arguments of the `tunesmith export` that wrote these weights; empty if the run wrote them itself.
        merge: How the weights were merged from those of other models; None if they were trained.
    """

    stages: Sequence[Stage] = ()
    strategy: str = ""
    processes: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    base: str = ""
    revision: str = ""
    data: str = ""
    versions: Mapping[str, str] = field(default_factory=versions)
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    mix: str = ""
    stop_at_step: int | None = None
    export: Sequence[str] = ()
    merge: Merge | None = None


def history_of(run: RunFolder, manifest: Mapping[str, Any], averaged: bool = False) -> History:
    """The history of the weights in a checkpoint.

    Args:
        run: The run that saved it.
        manifest: The checkpoint's manifest.
        averaged: Whether the weights are the moving average, which training does not evaluate.
    """
    sizes: dict[str, int] = {}
    try:
        strategy = load_strategy(str(run.accelerate))
        is_same = (strategy.name, strategy.num_processes) == (manifest.get("layout"), manifest["world"])
        if is_same and strategy.has_mesh:
            sizes = {name: size for name in _SIZES if (size := getattr(strategy.sizes, name)) > 1}
    except (ConfigError, OSError):
        pass  # the file is gone or damaged; the manifest has the name
    (before, first_data), (after, data) = evaluated(run, 0), evaluated(run, manifest["step"])
    after = {} if averaged else after
    return History(
        stages_of(manifest, run=run.id),
        str(manifest.get("layout") or ""),
        manifest["world"],
        sizes,
        manifest["base"],
        data=manifest["data_fingerprint"],
        versions=manifest["versions"],
        before=before if first_data == data else {},
        after=after,
        mix=str(run.mix) if run.mix.is_file() else "",
    )


def evaluated(run: RunFolder, step: int) -> tuple[dict[str, float], str | int | None]:
    """The metrics of a run's last evaluation at a step, and on what; none without one.

    A row is that of other weights if a later attempt started at or before its step.

    Returns:
        The metrics, and what is equal where the data is: its fingerprint; without one, the attempt, as an attempt
        evaluates on the same data throughout.
    """
    rows: list[dict[str, Any]] = []
    try:
        lines = run.metrics.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}, None
    for line in lines:
        with contextlib.suppress(ValueError):  # cut off by a crash
            if isinstance(row := parse_json(line), dict) and type(row.get("step")) is int:
                rows.append(row)
    last = max((attempt_of(row) for row in rows if row["step"] <= step), default=0)
    for row in reversed(rows):
        if row["step"] == step and "eval_loss" in row and attempt_of(row) == last:
            numbers = {name: value for name, value in row.items() if type(value) in (int, float)}
            data = row.get("evaluation_data")
            metrics = {name: value for name, value in numbers.items() if name.startswith("eval_")}
            return metrics, data if isinstance(data, str) else last
    return {}, None


def attempt_of(row: Mapping[str, Any]) -> int:
    """The attempt that wrote a row of metrics."""
    attempt = row.get("attempt")
    return attempt if type(attempt) is int else 0


def measured_at(results: Mapping[str, Any], last_step: int) -> dict[str, Any]:
    """The results of a run that are of the exported step; the loss in training is of the last one."""
    other = {"train_loss"} if results.get("exported_step", last_step) != last_step else set()
    return {name: value for name, value in results.items() if name not in other}


def public(value: Any) -> Any:
    """A value of an option as others may read it: local paths by their last part, URLs without credentials."""
    if isinstance(value, Mapping):
        return {key: public(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [public(entry) for entry in value]
    if not isinstance(value, str):
        return value
    if value.startswith("--") and "=" in value:  # an argument of a command
        option, _, value = value.partition("=")
        return f"{option}={public(value)}"
    if is_url(value) or "://" in value:
        url = urlsplit(value)
        if url.scheme in _PUBLIC_SCHEMES:
            host = url.netloc.rpartition("@")[2]
            if url.scheme == "hf" or not _is_private(host):
                return without_secrets(urlunsplit((url.scheme, host, url.path, "", "")))
        return without_secrets(f"{url.scheme}://.../{PurePath(url.path).name}")
    return PurePath(value).name if value.startswith(("/", "~")) else without_secrets(value)


def _is_private(host: str) -> bool:
    """Whether a host, with its port, is known in its own network only: by its address, or by a name without a dot."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        return not ipaddress.ip_address(name).is_global
    except ValueError:
        return "." not in name.rstrip(".") or name.lower().endswith((".local", ".localhost", ".internal", ".lan"))


def public_record(value: Any) -> Any:
    """An export's record (`tunesmith.json`) as others may read it."""
    record = public(value)
    if isinstance(record.get("config"), dict):
        record["config"].update(dict.fromkeys(_PRIVATE & record["config"].keys() - {"preset"}))
    return record


def hub_id(name: str | None) -> str | None:
    """The Hub id in the name of a model or data set of a valid config; None for local and embedded ones."""
    if not name or name == EMBEDDED or name.startswith(("/", "~", ".")):
        return None
    if match := re.match(r"hf://datasets/([^/@]+/[^/@]+)", name):
        return match[1]
    return None if "://" in name else name


def changed_options(config: TrainConfig) -> dict[str, Any]:
    """The options that differ from their defaults, as others may read them."""
    values = config.model_dump(exclude=set(_PRIVATE))
    fields = TrainConfig.model_fields
    return {name: public(value) for name, value in values.items()
            if fields[name].is_required() or value != fields[name].get_default(call_default_factory=True)}  # fmt: skip


def command(config: TrainConfig, history: History) -> str:
    """The command that repeats the last stage, for someone who has its local files, which are named by their last part.

    Options are those that differ from the defaults, so that it does not depend on a preset's content.
    """
    argv = ["tunesmith", "train"]
    if history.strategy:
        own = "" if history.strategy in strategy_names() else ".yaml"
        argv += ["--strategy", history.strategy + own]
    argv += ["--num_processes", str(history.processes)] if history.processes else []
    argv += [argument for name, size in history.sizes.items() for argument in (f"--{name}_size", str(size))]
    follow: tuple[str, ...] = ()
    if config.from_run:
        before = history.stages[-2].run if len(history.stages) > 1 else config.from_run
        argv, follow = [*argv, "--from_run", str(public(before))], _FOLLOW
    for name, value in changed_options(config).items():
        argv += [] if name in follow else [f"--{name}", text_of(value) or "none"]
    argv += ["--stop_at_step", str(history.stop_at_step)] if history.stop_at_step else []
    return shlex.join(argv)


def commands(config: TrainConfig, history: History) -> str:
    """The command that repeats the last stage, and the one that exports its weights if the run does not."""
    lines = [command(config, history)]
    if history.export:
        lines.append("tunesmith export RUN " + shlex.join(history.export))
    return "\n".join(lines)


def starts_from_result(config: TrainConfig) -> bool:
    """Whether the base is what another run exported, in a folder of this machine; an adapter is on that run's base."""
    return bool(config.from_run) and config.from_run == config.model_name_or_path


def base_in_words(name: str, from_run: str | None) -> str:
    """The base model for those who have to find it: by its name, or as the result of the run that exported it.

    Args:
        name: `model_name_or_path` of a config.
        from_run: Its option of that name.
    """
    if not from_run or from_run != name:
        return f"the base model {public(name)}"
    path = PurePath(name)
    is_export = path.name == "model" or path.name.startswith("export-")
    return f"the result of {path.parent.name if is_export else path.name}"


def first_base(config: TrainConfig, history: History) -> str:
    """The base model of the first stage, or of the only one."""
    stages = history.stages
    return str(public((stages[0].base or stages[0].run) if starts_from_result(config) and stages
                      else config.model_name_or_path))  # fmt: skip


def about_base(config: TrainConfig, history: History) -> str:
    """What the weights were trained from: the base model and its commit, or the result of the stage before."""
    if starts_from_result(config) and len(history.stages) > 1:
        first, before = history.stages[0], public(history.stages[-2].run)
        return f"the result of `{before}`" + (f", which began with `{public(first.base)}`" if first.base else "")
    revision = history.revision or config.model_revision
    text = f"`{public(config.model_name_or_path)}`" + (f" at revision `{revision}`" if revision else "")
    return text + (" (a folder of the publisher's)" if config.model_name_or_path.startswith(("/", "~")) else "")


def front_matter(config: TrainConfig, kind: str, history: History) -> dict[str, Any]:
    """The card's metadata, as the Hub reads it; the license is left to the publisher."""
    header: dict[str, Any] = {
        "library_name": "peft" if kind == "adapter" else "transformers",
        "tags": ["tunesmith", "merge"] if history.merge else ["tunesmith", short_name(config.objective), config.method],
    }
    stages = history.stages
    # An adapter cannot be loaded on the first base where that was trained in full before.
    earlier = stages[0].base if stages and starts_from_result(config) and kind != "adapter" else ""
    if base := hub_id(config.model_name_or_path) or hub_id(earlier):
        relation = "merge" if history.merge else "finetune"
        header |= {"base_model": base, "base_model_relation": "adapter" if kind == "adapter" else relation}
    if not config.objective_spec.scalar_head:
        header["pipeline_tag"] = "text-generation"
    names = [] if history.merge else data_names(config, history)
    datasets = dict.fromkeys(name for data in names if (name := hub_id(data)))
    return header | ({"datasets": list(datasets)} if datasets else {})


def data_names(config: TrainConfig, history: History) -> list[str]:
    """Names and paths of the training data: those of a mix's sources, as the run copied it, if it can be read."""
    if config.mix is None:
        return [config.training_data]
    mix = _mix(config, history)
    return [config.mix] if mix is None else [source.dataset_name for source in mix.sources]


def _mix(config: TrainConfig, history: History) -> Mix | None:
    """The mix of training data as the run copied it; None without one, or if it cannot be read."""
    if config.mix is None:
        return None
    try:
        return read_mix(history.mix or config.mix)
    except ConfigError:
        return None


def _sources(mix: Mix | None) -> str:
    """The sources of a mix as a table."""
    if mix is None:
        return ""
    lines = ["## Data", "", "| source | data | weight | first rows | trained |", "|---|---|---|---|---|"]
    for source in mix.sources:
        split = f", split {source.dataset_split}" if source.dataset_split else ""
        name, data = _cell(source.label), _cell(f"{public(source.dataset_name)}{split}")
        limit, loss = source.limit or "all", source.loss or "as the options say"
        lines.append(f"| {name} | {data} | {source.weight:g} | {limit} | {loss} |")
    ends = {
        "first_exhausted": "An epoch ends before the first source would repeat a row.",
        "all_exhausted": "An epoch ends once every source was read in full; smaller ones repeat.",
    }
    return "\n".join([*lines, "", ends[mix.stopping_strategy]])


def card_title(config: TrainConfig, history: History) -> str:
    """The name of the model."""
    return config.run_name or config.preset or PurePath(first_base(config, history)).name


def model_card(
    config: TrainConfig,
    kind: str,
    results: Mapping[str, Any],
    code: str,
    history: History,
    checked: str = "",
    weights: Mapping[str, tuple[int, str]] | None = None,
    gguf: str = "",
) -> str:
    """Writes the model card.

    Args:
        config: The options of the last stage.
        kind: `adapter`, `merged` or `full`.
        results: Last metrics of the run.
        code: Python that loads the export from `folder`.
        history: How the weights came to be.
        checked: The result of loading the export back.
        weights: Bytes and sha256 of each weight file.
        gguf: The section about GGUF files.
    """
    if history.merge:
        return _merge_card(config, kind, code, history, history.merge, checked, weights or {})
    title = card_title(config, history)
    data = ", ".join(f"`{public(name)}`" for name in data_names(config, history))
    sections = [
        f"---\n{as_yaml(front_matter(config, kind, history)).strip()}\n---",
        f"# {title}, fine-tuned",
        f"{kind.capitalize()} weights of {about_base(config, history)}, fine-tuned with Tunesmith (objective `"
        f"{short_name(config.objective)}`, method `{config.method}`) on {data}.",
        _order(history.stages),
        f"```python\n{code}\n```",
        _sources(_mix(config, history)),
        "## Results\n\n" + _results(results, history),
        checked[:1].upper() + checked[1:],
        gguf,
        _files(weights or {}),
        "## Options\n\nThose that differ from the defaults; the file `tunesmith.json` has all of them.\n\n"
        f"```yaml\n{as_yaml(changed_options(config)).strip()}\n```",
        _environment(history),
        "## To repeat it\n\nA path is named by its last part only.\n\n```\n" + commands(config, history) + "\n```",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _merge_card(
    config: TrainConfig, kind: str, code: str, history: History, merge: Merge, checked: str,
    weights: Mapping[str, tuple[int, str]],
) -> str:  # fmt: skip
    """The card of merged weights; for the arguments, see `model_card`."""
    facts = [f"density {merge.density:g}"] if merge.density is not None else []
    facts += [f"seed {merge.seed}"] if merge.seed is not None else []
    facts += [f"rank {merge.rank}"] if merge.rank is not None else []
    apart = "" if merge.deviation is None or merge.method == CAT else (
        "The updates of the result differ from the exact weighted sum of the models' updates by "
        f"{merge.deviation:.2g} of its norm."
    )  # fmt: skip
    how = f"`{merge.method}` ({METHODS[merge.method]})" + "".join(f", {fact}" for fact in facts)
    sections = [
        f"---\n{as_yaml(front_matter(config, kind, history)).strip()}\n---",
        f"# {PurePath(first_base(config, history)).name}, merged",
        f"{kind.capitalize()} weights of {about_base(config, history)}, merged with Tunesmith from those of "
        f"{len(merge.models)} models, by the method {how}.",
        _merged_models(merge),
        f"```python\n{code}\n```",
        checked[:1].upper() + checked[1:],
        apart,
        _files(weights),
        _environment(history),
        "## To repeat it\n\nA path is named by its last part only.\n\n```\n"
        + shlex.join(str(public(part)) for part in merge.command) + "\n```",
    ]  # fmt: skip
    return "\n\n".join(section for section in sections if section) + "\n"


def _merged_models(merge: Merge) -> str:
    """The merged models as a table."""
    lines = ["## Merged models", "", "| model | weight | trained | weights (sha256) |", "|---|---|---|---|"]
    for model in merge.models:
        stages = [_public_stage(stage) for stage in as_stages(model["stages"])]
        digests = ", ".join(f"{name} `{digest}`" for name, digest in model["files"].items())
        name, trained = (_cell(text) for text in (public(model["name"]), in_words(stages)))
        lines.append(f"| {name} | {model['weight']:g} | {trained} | {digests} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """A text in a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", r"\|")


def _public_stage(stage: Stage) -> Stage:
    return replace(stage, run=public(stage.run), data=public(stage.data))


def _order(stages: Sequence[Stage]) -> str:
    """The stages of training, if there are several."""
    if len(stages) < 2:
        return ""
    listed = [_public_stage(stage) for stage in stages]
    lines = "\n".join(f"{number}. {stage}" for number, stage in enumerate(listed, 1))
    return f"Trained in {len(stages)} stages, each from the result of the one before:\n\n{lines}"


def _results(results: Mapping[str, Any], history: History) -> str:
    """The measured numbers as tables: the evaluation data before and after, and what else the run reports."""
    before, after, tables = history.before, history.after, list[str]()
    first = "before this stage" if len(history.stages) > 1 else "before"
    if after:
        rows = [
            f"| {name} | {_number(before.get(name, 'not measured'))} | {_number(value)} |"
            for name, value in after.items()
        ]
        tables.append("\n".join([f"| evaluation data | {first} | after |", "|---|---|---|", *rows]))
    rows = [f"| {name} | {_number(value)} |" for name, value in results.items() if name not in after]
    if rows or not after:
        tables.append("\n".join(["| result | value |", "|---|---|", *(rows or ["| none | |"])]))
    return "\n\n".join(tables)


def _number(value: Any) -> str:
    """A measured number in five digits; anything else as it is."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _files(weights: Mapping[str, tuple[int, str]]) -> str:
    lines = [f"| {name} | {size} | `{digest}` |" for name, (size, digest) in sorted(weights.items())]
    head = "## Weights\n\n`sha256sum` of a downloaded file shows whether it is this one.\n\n| file | bytes | sha256 |"
    return "\n".join([head, "|---|---|---|", *lines]) if lines else ""


def _environment(history: History) -> str:
    sizes = "".join(f", {name}_size={size}" for name, size in history.sizes.items())
    facts = [f"strategy {history.strategy}{sizes}"] if history.strategy else []
    facts += [f"processes {history.processes}"] if history.processes else []
    facts += [f"digest of the base weights {history.base}"] if history.base else []
    facts += [f"fingerprint of the training data {history.data}"] if history.data else []
    facts += [f"{name} {number}" for name, number in history.versions.items()]
    return "## Environment\n\n" + "\n".join(f"- {fact}" for fact in facts)


def as_yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)


def dumped(record: Any) -> str:
    """The text of a JSON file of the export."""
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"
