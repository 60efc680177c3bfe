"""The config of a frozen model beside the one that is trained. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.options import TrainConfig

_FROZEN = {
    "method": "full", "master_weights": False, "merge_adapter": False, "gradient_checkpointing": False,
    "ddp_find_unused_parameters": True, "objective": "sft", "teacher": None, "freeze": [], "modules_to_save": [],
    "use_dora": False, "lora_rank_pattern": {}, "lora_alpha_pattern": {},
    "lora_target_parameters": [], "init_lora_weights": "default", "qat": "none",
}  # fmt: skip
"""Not those of the model that is trained. Weights are in the compute dtype, as those of any frozen model are; some may
be unused."""
_AS_IT_IS: dict[str, Any] = {
    "model_revision": None, "from_run": None, "trust_remote_code": False, "random_init": False,
    "num_hidden_layers": None, "rope_scaling": "none", "rope_factor": None, "rope_original_max_positions": None,
    "chat_template": None, "new_tokens": [], "pad_vocab_to_multiple_of": None,
}  # fmt: skip
"""A teacher is another model; code of its own is never run."""


def teacher_config(config: TrainConfig) -> TrainConfig:
    """The config of a run whose base model is the teacher of another run."""
    assert config.teacher is not None
    return config.model_copy(update={**_FROZEN, **_AS_IT_IS, "model_name_or_path": config.teacher})


def initial_config(config: TrainConfig) -> TrainConfig:
    """The config of a run whose base model is the initial model of another run."""
    return config.model_copy(update=_FROZEN)


def copies_initial(config: TrainConfig) -> bool:
    """Whether a copy of the initial model is loaded; adapters are switched off in place of that."""
    return config.penalizes_kl and config.method == "full"


def frozen_config(config: TrainConfig) -> TrainConfig | None:
    """The config of a run whose base model is the frozen one beside that of another run; None without one."""
    if config.objective_spec.teacher and config.teacher is not None:
        return teacher_config(config)
    return initial_config(config) if copies_initial(config) else None


@contextmanager
def about_frozen(config: TrainConfig) -> Iterator[None]:
    """Makes errors about a model, raised meanwhile, name the teacher; a copy of the initial model has no name."""
    try:
        yield
    except ConfigError as error:
        if not config.objective_spec.teacher:
            raise
        raise ConfigError(Mistake("teacher", config.teacher, f": {line}") for line in error.lines) from None
