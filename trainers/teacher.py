"""Loads a frozen model beside the one that is trained: the teacher of a distillation, or the initial model."""

from __future__ import annotations

from collections.abc import Sequence

from trainers.config.mistakes import errors_about
from trainers.config.options import TrainConfig
from trainers.config.teacher import copies_initial, initial_config, teacher_config
from trainers.data.prepare import TokenSet
from trainers.data.vocabulary import refuse_other_vocabulary
from trainers.model.load import build_unread, compute_dtype
from trainers.model.stored import TEACHER
from trainers.objectives.distillation import Divergence
from trainers.objectives.loss_module import LossModule
from trainers.objectives.teacher import InitialModel, Teacher
from trainers.run.from_run import refuse_adapter_start
from trainers.tools.preflight import check_positions, check_token_ids


def add_frozen(config: TrainConfig, loss: LossModule, splits: Sequence[TokenSet | None]) -> None:
    """Builds the frozen model that the loss compares with, if any, and leaves its weights in their files.

    Args:
        config: the run's config.
        loss: the module of the model that is trained, which the frozen one becomes a part of.
        splits: the data sets, whose token ids and lengths a teacher must support.

    Raises:
        ConfigError: if it cannot be loaded, the tokens of a teacher are others, or the initial model has an adapter.
    """
    refuse_adapter_start(config)
    if config.objective_spec.teacher:
        _add_teacher(config, loss, splits)
    elif copies_initial(config):  # which a resumed run also reads from the files of its base model
        model, stored = build_unread(initial_config(config))
        loss.teacher = InitialModel(model, compute_dtype(config), loss.temperature)
        loss.stored |= {f"{TEACHER}{name}": source for name, source in stored.items()}


def _add_teacher(config: TrainConfig, loss: LossModule, splits: Sequence[TokenSet | None]) -> None:
    divergence = Divergence.of(config.objective_options())
    if config.teacher is None:  # its predictions were recorded
        loss.divergence = divergence
        return
    refuse_other_vocabulary(config)
    teacher = teacher_config(config)
    with errors_about("model_name_or_path", "teacher"):
        model, stored = build_unread(teacher)
        loss.teacher = Teacher(model, compute_dtype(config), divergence)
        check_token_ids(teacher, splits, loss.teacher.vocab_size)
        check_positions(teacher, splits, None)
    loss.stored |= {f"{TEACHER}{name}": source for name, source in stored.items()}
