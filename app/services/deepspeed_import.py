"""Translates a DeepSpeed JSON into a strategy of Tunesmith: an Accelerate file, a strict DeepSpeed JSON, and options.

Every key of the JSON appears in the result with what became of it. What a run decides itself (batch, optimizer,
learning rate, precision) becomes options; what DeepSpeed reads stays in the JSON; the rest is named with its remedy.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

from app.services.json_leaves import has, leaves
from trainers.config.mistakes import ConfigError
from trainers.config.options import EMBEDDED
from trainers.config.validation import build
from trainers.strategy.deepspeed_rules import parse_json
from trainers.strategy.deepspeed_schema import AUTO, GONE, ONE_BIT, WITHOUT_EFFECT, DeepSpeedJson
from trainers.strategy.schema import ignored_keys, shortened

OPTION, FILE, JSON, OMITTED = "option", "Accelerate file", "DeepSpeed JSON", "left out"
"""What a key became: an option of `train`, a key of the Accelerate file or of the new JSON, or nothing."""
_DECIDED = '"auto": decided by the options of the run'
_OFF = "it is off"
_WARMUP = "the warm-up is linear; DeepSpeed's default is logarithmic"
_DEFAULT = "DeepSpeed's default, which this file relied on"

_SCHEDULES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
_ADAM = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
_LION = {"lr": "learning_rate", "weight_decay": "weight_decay"}
_ADAM_DEFAULTS = (
    ("lr", "learning_rate", 1e-3),
    ("betas", "adam_beta1", 0.9),
    ("betas", "adam_beta2", 0.999),
    ("eps", "adam_epsilon", 1e-8),
    ("weight_decay", "weight_decay", 0.0),
)
_LION_DEFAULTS = (
    ("lr", "learning_rate", 1e-3),
    ("betas", "lion_beta1", 0.9),
    ("betas", "lion_beta2", 0.999),
    ("weight_decay", "weight_decay", 0.0),
)
_MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb"}
_SECTIONS = (
    *("optimizer", "optimizer.params", "scheduler", "scheduler.params", "fp16", "bf16", "torch_autocast"),
    *("activation_checkpointing", "tensor_parallel", *_MONITORS),
    *("zero_optimization.offload_optimizer", "zero_optimization.offload_param"),
)
_OLD_OFFLOAD = {
    "cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param", "cpu_offload_params": "offload_param",
}  # fmt: skip
_INLINE = {
    "stage": "zero_stage",
    "offload_optimizer.device": "offload_optimizer_device",
    "offload_param.device": "offload_param_device",
}
"""Keys of `zero_optimization` that an Accelerate file can say without a JSON."""


@dataclass(frozen=True)
class MovedKey:
    """What became of one key of the JSON.

    Args:
        key: its dotted path.
        value: its value.
        target: `OPTION`, `FILE`, `JSON` or `OMITTED`.
        note: what it is called there, or why it is left out and what replaces it.
    """

    key: str
    value: Any
    target: str
    note: str


@dataclass
class ImportedStrategy:
    """The result of an import.

    Args:
        accelerate: keys of the Accelerate file, without `deepspeed_config_file`.
        deepspeed: content of the new DeepSpeed JSON; empty if the Accelerate file says everything.
        options: options of `train`.
        keys: what became of each key, in the order of the file.
    """

    accelerate: dict[str, Any]
    deepspeed: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    keys: list[MovedKey] = field(default_factory=list)


def import_deepspeed(content: dict[str, Any], num_processes: int | None = None) -> ImportedStrategy:
    """Translates the content of a DeepSpeed JSON.

    Args:
        content: the content, which need not be valid here.
        num_processes: processes of the run; None to derive it from the batch sizes, or else 2.

    Raises:
        ConfigError: if a value that decides what is trained makes no sense, or the batch needs `num_processes`.
    """
    try:
        return _Import(content).run(num_processes)
    except RecursionError:
        raise ConfigError("it is nested too deeply; write one object with sections") from None


class _Import:
    """The state of one import: keys leave `left` as they are translated.

    Args:
        content: content of the JSON.
    """

    def __init__(self, content: dict[str, Any]):
        self.left = copy.deepcopy(content)
        self.order = {path: index for index, (path, _) in enumerate(leaves(content))}
        self.reported: set[str] = set()
        self.result = ImportedStrategy({"compute_environment": "LOCAL_MACHINE", "num_machines": 1})

    def run(self, num_processes: int | None) -> ImportedStrategy:
        result = self.result
        for path in _SECTIONS:
            if not isinstance(value := self.peek(path), dict | None):
                raise ConfigError.about(path, shortened(repr(value)), "is not a section", "write {...}")
        self._gone()
        mesh = self._mesh()
        processes = self._batch(num_processes, mesh)
        self._optimizer()
        self._scheduler()
        self._clipping()
        self._precision()
        self._others()
        self._zero(processes, mesh)
        result.keys.sort(key=lambda moved: self.order.get(moved.key, len(self.order)))
        build({"model_name_or_path": EMBEDDED, "dataset_name": EMBEDDED, **_checkable(result.options)})
        return result

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def take(self, path: str, target: str, note: str) -> Any:
        """Removes a key or section and notes what became of each of its leaves; returns its value, None if absent."""
        *parents, name = path.split(".")
        section: Any = self.left
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if not isinstance(section, dict) or name not in section:
            return None
        value = section.pop(name)
        for leaf, each in leaves({path: value}):
            if leaf in self.order:  # not a section that is empty by now, or a key under its new name
                self.note(leaf, each, target, note)
        return value

    def note(self, key: str, value: Any, target: str, note: str) -> None:
        """Notes what became of a key; the first note counts, as a key may go on under its new name."""
        if key not in self.reported:
            self.reported.add(key)
            self.result.keys.append(MovedKey(key, value, target, note))

    def option(self, path: str, name: str, value: Any = None, note: str = "") -> None:
        """Turns a key into an option; `value` if it differs from the key's. The value "auto" is left to the options."""
        written = self.peek(path)
        if written == AUTO:
            self.take(path, OMITTED, _DECIDED)
            return
        if written is None:
            return
        self.take(path, OPTION, f"{name}{f': {note}' if note else ''}")
        self.result.options[name] = written if value is None else value

    def _default(self, path: str, name: str, value: Any) -> None:
        """Sets an option to the default that DeepSpeed takes for a key that is absent."""
        self.result.options[name] = value
        self.note(f"{path} (absent)", value, OPTION, f"{name}: {_DEFAULT}")

    def _params(self, section: str) -> dict[str, Any]:
        """A copy of the parameters of the optimizer or scheduler, as they are written."""
        params = self.peek(f"{section}.params")
        return dict(params) if isinstance(params, dict) else {}

    def peek(self, path: str) -> Any:
        value: Any = self.left
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    # -- topics -------------------------------------------------------------------------------------------------------

    def _gone(self) -> None:
        for path, replacement in GONE.items():
            value = self.peek(path)
            off = value in ({}, False) or (isinstance(value, dict) and value.get("enabled") is False)
            self.take(path, OMITTED, _OFF if off else replacement)

    def _mesh(self) -> int:
        """Moves the sizes of tensor and sequence parallelism; returns the processes that they take."""
        mesh, product = {}, 1
        for path, key in (
            ("tensor_parallel.autotp_size", "parallelism_config_tp_size"),
            ("tensor_parallel.tp.tp_size", "parallelism_config_tp_size"),
            ("sequence_parallel_size", "parallelism_config_sp_size"),
        ):
            size = self.peek(path)
            if size is not None and self._count(path, 0) > 1:
                self.take(path, FILE, f"parallelism_config.{key}")
                mesh[key] = size
                product *= size
        self.take("sequence_parallel_size", OMITTED, "1 is no parallelism")
        self.take("tensor_parallel", OMITTED, "matrices are split by the model's own plan; see docs/strategies.md")
        if mesh:
            self.result.accelerate["parallelism_config"] = mesh
        return product

    def _batch(self, num_processes: int | None, mesh: int) -> int:
        """Moves the batch sizes, of which one follows from the others; returns the number of processes.

        Raises:
            ConfigError: if they contradict each other, or need the number of processes.
        """
        total, micro, steps = (
            self._count(name, 1)
            for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        )
        ranks, remainder = divmod(num_processes or 0, mesh)
        if num_processes and (remainder or not ranks):
            problem = f"is no multiple of the {mesh} processes that share a row or a matrix"
            raise ConfigError.about("num_processes", num_processes, problem, f"write {mesh} or a multiple")
        # DeepSpeed takes one micro-batch per step if the JSON says nothing of steps or of the total.
        absent = (self.peek("train_batch_size"), self.peek("gradient_accumulation_steps")) == (None, None)
        if micro and absent:
            steps = 1
        if micro and steps and not total:
            if not ranks:
                problem = f"x {steps} micro-batches is the batch of one process"
                remedy = "add --num_processes, the processes of the run"
                raise ConfigError.about("train_micro_batch_size_per_gpu", micro, problem, remedy)
            total = micro * steps * ranks
        elif total and (factor := (micro or 1) * (steps or 1) * (ranks or 1)) > 1:
            quotient, remainder = divmod(total, factor)
            if remainder or (micro and steps and ranks and quotient != 1):
                factors = {"rows": micro, "micro-batches": steps, "processes": ranks}
                product = " x ".join(f"{count} {name}" for name, count in factors.items() if count)
                problem = f"is not {product}{'' if micro and steps and ranks else ', or a multiple'}"
                raise ConfigError.about("train_batch_size", total, problem, "make them agree, or remove one")
            if micro and steps:
                ranks = ranks or quotient
            elif steps and ranks:
                self.result.options["per_device_train_batch_size"] = quotient
        self._move_batch(total, steps)
        self.result.accelerate["num_processes"] = (ranks or 2) * mesh
        return (ranks or 2) * mesh

    def _move_batch(self, total: int, steps: int) -> None:
        self.option("train_micro_batch_size_per_gpu", "per_device_train_batch_size")
        if total:
            self.result.options["global_batch_size"] = total
            self.take("train_batch_size", OPTION, f"global_batch_size: {total}")
            if steps:
                self.take("gradient_accumulation_steps", OPTION, f"global_batch_size: {total}, which implies it")
        self.take("train_batch_size", OMITTED, _DECIDED)
        self.take("gradient_accumulation_steps", OMITTED, f"{_DECIDED}; set global_batch_size" if steps else _DECIDED)

    def _count(self, path: str, least: int) -> int:
        """A whole number; 0 if it is absent or "auto".

        Raises:
            ConfigError: if it is anything else.
        """
        value = self.peek(path)
        if value is None or value == AUTO:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 10**9:
            raise ConfigError.about(path, repr(value)[:80], "is not a whole number", f"write {least} or more")
        return value

    def _optimizer(self) -> None:
        kind = self.peek("optimizer.type")
        if kind is None:
            self.take("optimizer", OMITTED, "it names no type; the script's AdamW is used")
            return
        name = str(kind).lower()
        params = self._params("optimizer")
        by_schedule = "warmup_max_lr" in self._params("scheduler")
        if name not in ("adam", "adamw", *ONE_BIT):
            offloads = self._offloads()  # by DeepSpeed's own Lion, which has to stay in the JSON
            is_option = name == "lion" and not offloads
            for key, option in _LION.items():
                self.option(f"optimizer.params.{key}", option)
            for key, option, default in _LION_DEFAULTS:
                if key not in params and (key == "lr" or is_option) and not (key == "lr" and by_schedule):
                    self._default("optimizer.params", option, default)
            if is_option:
                self._betas(params.get("betas"), "lion")
                self.take("optimizer.params", OMITTED, "no argument of Lion here")
                self.take("optimizer", OPTION, "optim: the script's own Lion")
                self.result.options["optim"] = "lion"
            return  # the schema refuses the others by name
        if name == "adam" and params.get("adam_w_mode") is False:
            problem = ": Adam with L2 is another optimizer"
            remedy = 'write "type": "AdamW", or remove adam_w_mode'
            raise ConfigError.about("optimizer.params.adam_w_mode", False, problem, remedy)
        for key, option in _ADAM.items():
            self.option(f"optimizer.params.{key}", option)
        self._betas(params.get("betas"), "adam")
        for key, option, default in _ADAM_DEFAULTS:
            if key not in params and not (key == "lr" and by_schedule):
                self._default("optimizer.params", option, default)
        was = "removed from DeepSpeed; " if name in ONE_BIT else ""
        less = "; fewer bytes per step: --ddp_comm_hook bf16 with --strategy ddp" if was else ""
        self.take("optimizer.params", OMITTED, f"{was}no argument of AdamW here")
        self.take("optimizer", OPTION, f"optim: {was}the script's own AdamW{less}")
        self.result.options["optim"] = "adamw"

    def _offloads(self) -> bool:
        """Whether weights or optimizer states rest outside the device, also by the keys of older versions."""
        zero = self.peek("zero_optimization")
        sections = [self.peek(f"zero_optimization.{name}.device") for name in ("offload_optimizer", "offload_param")]
        old = isinstance(zero, dict) and any(zero.get(name) is True for name in _OLD_OFFLOAD)
        return old or any(device not in (None, "none") for device in sections)

    def _betas(self, betas: Any, optimizer: str) -> None:
        path = "optimizer.params.betas"
        if betas is None or betas == AUTO:
            self.take(path, OMITTED, _DECIDED)
            return
        if not isinstance(betas, list) or len(betas) != 2:
            raise ConfigError.about(path, repr(betas)[:80], "is not a pair", "write two numbers")
        names = f"{optimizer}_beta1", f"{optimizer}_beta2"
        self.take(path, OPTION, ", ".join(names))
        self.result.options |= dict(zip(names, betas, strict=True))

    def _scheduler(self) -> None:
        kind = self.peek("scheduler.type")
        if kind is None:
            self.take("scheduler", OMITTED, "it names no type; lr_scheduler_type decides")
            return
        schedule = _SCHEDULES.get(str(kind).lower())
        if schedule is None:
            self.take("scheduler", OMITTED, "not offered; --lr_scheduler_type cosine with --warmup_steps comes closest")
            return
        options, params = self.result.options, self._params("scheduler")
        kind_of_warmup = "" if params.get("warmup_type") == "linear" else _WARMUP
        self.take("scheduler.type", OPTION, f"lr_scheduler_type: {schedule}")
        options["lr_scheduler_type"] = schedule
        if "warmup_num_steps" not in params:
            self._default("scheduler.params", "warmup_steps", 1000)
        if schedule == "cosine" and "cos_min_ratio" not in params:
            self._default("scheduler.params", "min_lr_ratio", 1e-4)
        self.option("scheduler.params.warmup_num_steps", "warmup_steps", note=kind_of_warmup)
        self.option("scheduler.params.warmup_max_lr", "learning_rate")
        self.option("scheduler.params.total_num_steps", "max_steps")
        self.option("scheduler.params.cos_min_ratio", "min_lr_ratio")
        low, high = params.get("warmup_min_lr"), options.get("learning_rate")
        if schedule == "linear" and isinstance(low, int | float) and isinstance(high, int | float) and 0 < low < high:
            options["min_lr_ratio"] = low / high
            note = "min_lr_ratio, at which the decay ends; the warm-up starts from 0"
            self.take("scheduler.params.warmup_min_lr", OPTION, note)
        for name in ("warmup_min_lr", "warmup_min_ratio"):
            zero = params.get(name) in (None, 0, AUTO)
            self.take(f"scheduler.params.{name}", OMITTED, "as here" if zero else "the warm-up starts from 0")
        self.take("scheduler", OMITTED, kind_of_warmup or "as here")

    def _clipping(self) -> None:
        """Moves the limit of the gradient norm, which DeepSpeed does not clip unless the JSON says so."""
        if self.peek("gradient_clipping") is None:
            self.take("gradient_clipping", OMITTED, "no value")
            self._default("gradient_clipping", "max_grad_norm", 0.0)
        self.option("gradient_clipping", "max_grad_norm")

    def _precision(self) -> None:
        for name in ("bf16", "fp16", "torch_autocast"):
            enabled = self.peek(f"{name}.enabled")
            if enabled == AUTO:
                self.take(name, OMITTED, _DECIDED)
            elif enabled is not True:
                self.take(name, OMITTED, _OFF)
            else:
                self.result.options["mixed_precision"] = "bf16"
                scaled = "; loss scaling under ZeRO is not offered, and bf16 needs none" if name == "fp16" else ""
                self.take(f"{name}.enabled", OPTION, f"mixed_precision: bf16, with fp32 master weights{scaled}")
                self.take(name, OMITTED, f"the compute rule is the same for every strategy{scaled}")

    def _others(self) -> None:
        """Moves what has an option of its own."""
        for name, tracker in _MONITORS.items():
            if self.peek(f"{name}.enabled") is True:
                self.take(name, OPTION, f"report_to: {tracker}; project and run are named by the run")
                self.result.options.setdefault("report_to", []).append(tracker)
        recompute = self.peek("activation_checkpointing")
        if isinstance(recompute, dict) and recompute:
            self.result.options["gradient_checkpointing"] = True
            if recompute.get("cpu_checkpointing") is True:
                self.result.options["activation_offloading"] = True
                self.take("activation_checkpointing.cpu_checkpointing", OPTION, "activation_offloading")
            self.take("activation_checkpointing", OPTION, "gradient_checkpointing")
        steps = self.peek("steps_per_print")
        if isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1:
            self.option("steps_per_print", "logging_steps")
        for name in WITHOUT_EFFECT:
            self.take(name, OMITTED, "off, or without effect here")

    def _zero(self, processes: int, mesh: int) -> None:
        """Moves `zero_optimization`: into the Accelerate file if that can say all of it, else the JSON is kept."""
        result, zero = self.result, self._renamed_zero()
        accelerate = result.accelerate
        accelerate["num_processes"] = max(processes, 2)
        if mesh > 1:
            data_axis = "dp_shard" if zero.get("stage") else "dp_replicate"
            key = f"parallelism_config_{data_axis}_size"
            accelerate["parallelism_config"] = {key: processes // mesh, **accelerate["parallelism_config"]}
        if not zero.get("stage"):
            accelerate["distributed_type"] = "MULTI_GPU"
            if (kind := self.peek("optimizer.type")) is not None:
                problem = "needs ZeRO: without it DeepSpeed is not used"
                raise ConfigError.about("optimizer.type", shortened(str(kind)), problem, 'write "type": "AdamW"')
            self.take("zero_optimization.stage", FILE, "distributed_type: MULTI_GPU, as stage 0 shards nothing")
            for name in list(self.left):
                self.take(name, OMITTED, "without ZeRO nothing reads it; the strategy is ddp")
            return
        accelerate["distributed_type"] = "DEEPSPEED"
        self._drop_refused()
        for path, reason in ignored_keys(DeepSpeedJson, self.left):
            self.take(path, OMITTED, reason)
        remaining = dict(leaves(self.left.get("zero_optimization", {})))
        only_zero = set(self.left) == {"zero_optimization"}
        if only_zero and set(remaining) <= set(_INLINE) and "nvme" not in map(str, remaining.values()):
            accelerate["deepspeed_config"] = {_INLINE[key]: value for key, value in remaining.items()}
            for key in remaining:
                self.take(f"zero_optimization.{key}", FILE, f"deepspeed_config.{_INLINE[key]}")
            self.left = {}
            result.keys = [replace(moved, target=FILE) if moved.target == JSON else moved for moved in result.keys]
        else:
            accelerate["deepspeed_config"] = {}
            for path, value in leaves(self.left):
                if path in self.order:
                    self.note(path, value, JSON, "as it is")
        accelerate["deepspeed_config"]["zero3_init_flag"] = False
        result.deepspeed = self.left

    def _renamed_zero(self) -> dict[str, Any]:
        """The section with the keys of older versions under their present names."""
        zero = self.left.get("zero_optimization")
        if isinstance(zero, bool):  # the form of DeepSpeed 0.1
            self.take("zero_optimization", FILE, f"zero_stage: {int(zero)}")
            self.left["zero_optimization"] = zero = {"stage": 1} if zero else {}
        if zero is None:
            return {}
        if not isinstance(zero, dict):
            raise ConfigError.about("zero_optimization", repr(zero)[:80], "is not a section", "write {...}")
        for name, section in _OLD_OFFLOAD.items():
            if self.take(f"zero_optimization.{name}", JSON, f"{section}.device, its present name") is True:
                zero.setdefault(section, {"device": "cpu"})
        for section in ("offload_optimizer", "offload_param"):
            if self.peek(f"zero_optimization.{section}.device") in (None, "none") and section in zero:
                self.take(f"zero_optimization.{section}", OMITTED, "nothing is offloaded")
        if self.peek("zero_optimization.offload_param.device") == "nvme":
            note = "cpu, as weights on NVMe cannot be checkpointed"
            self.take("zero_optimization.offload_param.device", JSON, note)
            zero["offload_param"]["device"] = "cpu"
            self.take("zero_optimization.offload_param.nvme_path", OMITTED, "weights are offloaded to host memory")
        return zero

    def _drop_refused(self) -> None:
        """Takes out of the JSON what the strict check refuses, one round per set of mistakes.

        Raises:
            ConfigError: for a mistake that no key can be left out for.
        """
        for path in [name for name in self.left if name.startswith("_") or self.left[name] in ({}, None)]:
            self.take(path, OMITTED, "a comment" if path.startswith("_") else "empty")
        while True:
            try:
                parse_json(self.left)
                return
            except ConfigError as error:
                removed = False
                for mistake in error.mistakes:
                    if mistake.option.endswith("stage") or mistake.option == "optimizer.type":
                        raise
                    if self.peek(mistake.option) is not None or has(self.left, mistake.option):
                        self.take(mistake.option, OMITTED, f"{mistake.problem}; {mistake.remedy}".lstrip(":, "))
                        removed = True
                if not removed:
                    raise


def _checkable(options: dict[str, Any]) -> dict[str, Any]:
    """The options with a global batch that the micro-batch divides, which a file may leave to the run."""
    micro = options.get("per_device_train_batch_size")
    usable = "global_batch_size" in options or not isinstance(micro, int)
    return options if usable else {**options, "global_batch_size": micro}
