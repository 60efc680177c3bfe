"""The values that remedies give to options, computed from what the run was asked to do."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from app.diagnosis.plan import Plan
from trainers.strategy.micro_batch import fit_micro_batch
from trainers.strategy.pipeline_schedules import SCHEDULES
from trainers.strategy.strategy import Machines, load_strategy, over_machines, resolve

Facts = dict[str, Any]
_MORE_SHARDED = {
    "ddp": "fsdp2", "zero1": "zero2", "zero2": "zero3", "zero3": "zero3_offload", "fsdp1_grad_op": "fsdp1",
    "fsdp1": "fsdp2_offload", "fsdp2": "fsdp2_offload",
}  # fmt: skip
_USUAL_RATES = {"full": 1e-5, "lora": 1e-4, "qlora": 1e-4}


def smaller_micro_batch(plan: Plan, facts: Facts) -> str | None:
    """The largest micro-batch that the planner expects to fit, else the next smaller one that divides."""
    if facts.get("evaluates"):
        return None
    config, sizes = plan.config, []
    while config.per_device_train_batch_size > 1:
        halved = config.model_copy(update={"per_device_train_batch_size": config.per_device_train_batch_size // 2})
        config = fit_micro_batch(halved, plan.strategy)
        if config.global_batch_size % (config.per_device_train_batch_size * plan.strategy.data_parallel_size):
            break
        sizes.append(config)
    if not sizes:
        return None
    now, *smaller = plan.fits([plan.config, *sizes], plan.strategy) if len(sizes) > 1 else [None]
    # A planner that expects to fit what has just run out of memory has nothing to say about this model.
    fitting = [config for config, fits in zip(sizes, smaller, strict=False) if fits] if now is False else sizes
    return str((fitting or sizes[-1:])[0].per_device_train_batch_size)


def smaller_eval_batch(plan: Plan, facts: Facts) -> str | None:
    """Half the evaluation batch, where that ran out of memory."""
    half = plan.config.per_device_eval_batch_size // 2
    return str(half) if half and facts.get("evaluates") else None


def more_sharded(plan: Plan, facts: Facts) -> str | None:
    """A strategy that keeps less of the model on each device than the run's own.

    None unless the run has a bundled strategy as it is: another would drop the user's own settings, such as a mesh.
    """
    own, config = plan.strategy, plan.config
    if own.num_processes == 1 or own.name not in _MORE_SHARDED:
        return None
    values, stages = own.values, (config.pp_size, config.pp_schedule)
    address = str(values.get("main_process_ip") or ""), int(values.get("main_process_port") or 0)
    machines = Machines(plan.machines, 0, *address) if plan.machines > 1 else None
    bundled = over_machines(load_strategy(own.name), machines)
    bundled = resolve(bundled, own.num_processes, config.mixed_precision, *stages)
    return _MORE_SHARDED[own.name] if replace(bundled, summary=own.summary) == own else None


def offloaded(plan: Plan, facts: Facts) -> str | None:
    """Whether to move activations to host memory: where a GPU's memory, and not the host's, ran out."""
    return "true" if plan.has_gpu and re.search("CUDA|CUBLAS", str(facts.get("text"))) else None


def tenth_of_rate(plan: Plan, facts: Facts) -> str:
    """A tenth of the learning rate."""
    return f"{plan.config.learning_rate / 10:.6g}"


def usual_rate(plan: Plan, facts: Facts) -> str | None:
    """The usual learning rate of the method, where the run's own is far below it."""
    usual = _USUAL_RATES[plan.config.method]
    return f"{usual:g}" if plan.config.scaled_learning_rate() < usual / 3 else None


def clipped(plan: Plan, facts: Facts) -> str | None:
    """The usual bound of the gradient norm, where the run has none or a higher one."""
    return "1.0" if not plan.config.max_grad_norm or plan.config.max_grad_norm > 1 else None


def longer_timeout(plan: Plan, facts: Facts) -> str | None:
    """Five times the time that a rank may take for one thing, where the rank was still at work."""
    return None if facts.get("condition") else str(plan.config.hang_timeout * 5)


def tenth_of_steps(plan: Plan, facts: Facts) -> str:
    """A tenth of the steps of the run."""
    return str(max(1, int(facts["total"]) // 10))


def least_micro_batch(plan: Plan, facts: Facts) -> str | None:
    """A micro-batch that gives a pipeline twice the micro-batches."""
    half = plan.config.per_device_train_batch_size // 2
    return str(half) if half and SCHEDULES[plan.strategy.pp_schedule] else None


def twice_the_micro_batch(plan: Plan, facts: Facts) -> str | None:
    """Twice the micro-batch, where the step accumulates several."""
    size = plan.config.per_device_train_batch_size * 2
    divides = plan.config.global_batch_size % (size * plan.strategy.data_parallel_size) == 0
    return str(size) if divides else None


def other_port(plan: Plan, facts: Facts) -> str | None:
    """The next port, for a run on several machines; on one machine every start takes a free one."""
    port = int(plan.strategy.values.get("main_process_port") or 29500)
    return str(port + 1 if port < 65535 else 29500) if plan.machines > 1 else None


def reached_step(plan: Plan, facts: Facts) -> str | None:
    """The step of the checkpoint, as the length of a run that ended before it."""
    return facts.get("reached") or None


def longest_row(plan: Plan, facts: Facts) -> str | None:
    """The longest row of the data, up to four times the present limit."""
    longest = int(str(facts.get("longest") or "0").replace(",", ""))
    return str(longest) if plan.config.max_length < longest <= 4 * plan.config.max_length else None


def exact_dtype(plan: Plan, facts: Facts) -> str | None:
    """The dtype that rounds nothing, where the export was rounded."""
    return "float32" if facts.get("rounded") else None
