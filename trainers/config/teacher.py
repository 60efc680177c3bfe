"""The config that a teacher is loaded with. Imports no torch."""

from __future__ import annotations

from trainers.config.options import TrainConfig

_AS_IT_IS = {
    "model_revision": None, "from_run": None, "trust_remote_code": False, "random_init": False,
    "num_hidden_layers": None, "rope_scaling": "none", "rope_factor": None, "rope_original_max_positions": None,
    "method": "full", "master_weights": False, "merge_adapter": False, "chat_template": None,
    "gradient_checkpointing": False, "ddp_find_unused_parameters": True, "objective": "sft", "teacher": None,
}  # fmt: skip
"""Not those of the model that is trained. Weights are in the compute dtype, as those of any frozen model are; some may
be unused; and code of its own is never run."""


def teacher_config(config: TrainConfig) -> TrainConfig:
    """The config of a run whose base model is the teacher of another run."""
    assert config.teacher is not None
    return config.model_copy(update={**_AS_IT_IS, "model_name_or_path": config.teacher})
