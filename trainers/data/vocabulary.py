"""Compares the tokenizers of a model and of its teacher. Imports no torch."""

from __future__ import annotations

from trainers.config.mistakes import ConfigError, errors_about
from trainers.config.options import TrainConfig
from trainers.config.teacher import teacher_config
from trainers.data.tokenizer import load_tokenizer


def refuse_other_vocabulary(config: TrainConfig) -> None:
    """Raises ConfigError if a token id means another token to the teacher, or only one of both models knows it."""
    own = load_tokenizer(config).get_vocab()
    with errors_about("model_name_or_path", "teacher"):
        other = load_tokenizer(teacher_config(config)).get_vocab()
    if own == other:
        return
    ours, theirs = ({number: token for token, number in tokens.items()} for tokens in (own, other))
    first = min(number for number in {*ours, *theirs} if ours.get(number) != theirs.get(number))
    meanings = [repr(tokens[first]) if first in tokens else "no token" for tokens in (theirs, ours)]
    raise ConfigError.about(
        "teacher",
        config.teacher,
        f"has another tokenizer: its token {first} is {meanings[0]}, that of the model to train {meanings[1]}",
        "use a teacher of the same family, whose tokenizer is the same",
    )
