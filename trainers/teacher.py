"""Loads the teacher of a distillation, and checks that it speaks of the same tokens as the model that is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainers.config.mistakes import errors_about
from trainers.config.options import TrainConfig
from trainers.config.teacher import teacher_config
from trainers.data.prepare import TokenSet
from trainers.data.vocabulary import refuse_other_vocabulary
from trainers.model.load import build_unread, compute_dtype
from trainers.model.stored import TEACHER
from trainers.objectives.distillation import Divergence
from trainers.objectives.loss_module import LossModule
from trainers.objectives.teacher import Teacher
from trainers.tools.preflight import check_positions, check_token_ids


def add_teacher(config: TrainConfig, loss: LossModule, splits: Sequence[TokenSet | None]) -> None:
    """Builds the teacher, and leaves its weights in their files as those of the base model are.

    Args:
        config: the run's config.
        loss: the module of the model that is trained, which the teacher becomes a part of.
        splits: the data sets, whose token ids and lengths the teacher must support.

    Raises:
        ConfigError: if the teacher cannot be loaded, or its tokens are others.
    """
    refuse_other_vocabulary(config)
    own: dict[str, Any] = config.objective_options()
    del own["teacher"]
    teacher = teacher_config(config)
    with errors_about("model_name_or_path", "teacher"):
        model, stored = build_unread(teacher)
        loss.teacher = Teacher(model, compute_dtype(config), Divergence(**own))
        check_token_ids(teacher, splits, loss.teacher.vocab_size)
        check_positions(teacher, splits, None)
    loss.stored |= {f"{TEACHER}{name}": source for name, source in stored.items()}
