"""Why a mesh cannot train an objective. Imports no torch."""

from __future__ import annotations

from trainers.config.options import TrainConfig
from trainers.config.teacher import copies_initial
from trainers.strategy.mesh import MeshSizes


def objective_refusal(sizes: MeshSizes, config: TrainConfig) -> str | None:
    """Returns why the config's objective cannot be trained with a mesh of these sizes; None if it can."""
    spec, objective = config.objective_spec, f"objective={config.objective}"
    splits_rows_or_layers = sizes.tp * sizes.sequence_shards * sizes.pp * sizes.ep > 1
    if config.eval_only and splits_rows_or_layers:
        return f"eval_only=true with {sizes}: only data-parallel ranks evaluate row by row; use fsdp2, for instance"
    if config.generates_answers and splits_rows_or_layers:
        return (
            f"eval_generate_steps={config.eval_generate_steps} with {sizes}: only data-parallel ranks answer prompts; "
            "use fsdp2, for instance, or eval_generate_steps=0"
        )
    if spec.teacher and sizes.pp * sizes.ep > 1:
        reason = "the teacher is not split so" if config.teacher is not None else "recorded teachers are not read there"
        return f"{objective} with {sizes}: {reason}; use fsdp2, for instance"
    if copies_initial(config) and sizes.ep > 1:
        remedy = "use method=lora, which needs no copy, or fsdp2, for instance"
        return f"beta={config.beta} with {sizes}: the copy of the initial model is not split so; {remedy}"
    if sizes.pp > 1 and spec.loss_of == "documents":
        return f"{objective} with {sizes}: pipelines sum over tokens; use fsdp2, for instance"
    samples = spec.samples and (config.recorded_answers is None or config.has_evaluation())
    if samples and config.sampler_url is None and sizes.tp * sizes.sequence_shards * sizes.ep > 1:
        remedy = "use fsdp2, a server (sampler_url), or recorded_answers without evaluation data"
        return f"{objective} with {sizes}: only data-parallel ranks sample answers; {remedy}"
    if samples and sizes.ep > 1:
        return f"{objective} with {sizes}: not tested with a server; use fsdp2, for instance"
    if samples and config.recorded_answers is None and config.steps_per_generation > 1 and sizes.sequence_shards > 1:
        return (
            f"steps_per_generation={config.steps_per_generation} with {sizes}: ranks that share a row know only some "
            "of its old log-probabilities; use fsdp2, for instance, or steps_per_generation=1"
        )
    return None
