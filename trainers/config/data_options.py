"""The options of the data. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from trainers.config.option_types import IsoDate, Optionally, OptionGroup, Pairs, option

FIXED_DATE = "2024-07-26"
"""Default date passed to chat templates: the one that Llama's templates fall back to."""


class DataOptions(OptionGroup):
    """What the model is trained on, and how rows become tokens."""

    dataset_name: Annotated[str | None, Optionally] = option("data", None)
    """Training data: a file, folder, glob, URL or Hub id; `embedded` is the data that ships with Tunesmith."""
    dataset_query: Annotated[str | None, Optionally] = option("data", None)
    """SQL query whose rows are the training data; `dataset_name` is the database then."""
    mix: Annotated[str | None, Optionally] = option("data", None)
    """YAML file of sources and their weights, in place of `dataset_name`; see docs/data.md."""
    dataset_config_name: Annotated[str | None, Optionally] = option("data", None)
    """Configuration (subset) of a Hub data set."""
    dataset_split: str = option("data", "train", min_length=1)
    """Split of a Hub data set to train on."""
    eval_dataset_name: Annotated[str | None, Optionally] = option("data", None)
    """Evaluation data: a file, folder, glob, URL or Hub id, as for `dataset_name`."""
    eval_split: str = option("data", "eval", min_length=1)
    """Split of `eval_dataset_name` when that is a Hub data set."""
    eval_share: float = option("data", 0.0, ge=0, lt=1)
    """Share of the training rows held out for evaluation, about, by a hash of what they say."""
    dataset_format: Literal[
        "auto", "chat", "sharegpt", "alpaca", "prompt_completion", "text", "preference", "labelled", "prompt"
    ] = option("data", "auto")
    """Row format; `auto` detects it from the columns."""
    columns: Pairs = option("data", {})
    """Column names of your data by role, such as `prompt=question,completion=answer`."""
    sample_by: Literal["line", "paragraph", "document"] = option("data", "line")
    """What counts as one document in a plain text file."""
    chat_template: Annotated[str | None, Optionally] = option("data", None)
    """Jinja file that replaces the tokenizer's chat template."""
    assistant_only_loss: bool = option("data", True)
    """Compute the loss on assistant (or completion) tokens only; plain text always trains on all tokens."""
    thoughts: Literal["keep", "drop", "train_empty"] = option("data", "keep")
    """Reasoning before replies: train on it, or drop it; train_empty: also train on a template's empty think block."""
    template_date: IsoDate = option("data", FIXED_DATE)
    """Date for chat templates that insert today's; fixed, so the same data gives the same tokens on any day."""
    max_length: int = option("data", 1024, "tokens", ge=8, le=2**24)
    """Maximum length of a training row."""
    overlong: Literal["truncate", "drop", "split", "refuse"] = option("data", "truncate")
    """What to do with rows longer than `max_length`; they are counted and reported."""
    packing: bool = option("data", True)
    """Pack several documents into each row of `max_length`; attention never crosses document boundaries."""
    group_by_length: bool = option("data", True)
    """Without packing, batch rows of similar length together to save padding."""
    bad_rows: Literal["refuse", "skip"] = option("data", "refuse")
    """Refuse data that has unreadable rows, or skip those rows and list them."""
    max_train_samples: Annotated[int | None, Optionally] = option("data", None, "rows", ge=1, le=10**12)
    """Use only the first N rows of the training data."""
    max_eval_samples: Annotated[int | None, Optionally] = option("data", None, "rows", ge=1, le=10**12)
    """Use only the first N rows of the evaluation data; of a mix, of each source."""
    dataset_streaming: bool = option("data", False)
    """Tokenize the training data while the run goes, in little disk space; see docs/data.md."""
    streaming_window: int = option("data", 50_000, "rows", ge=1, le=10**9)
    """Rows that are shuffled among each other under `dataset_streaming`."""
    streaming_cache: int = option("data", 4096, "MiB", ge=1, le=10**9)
    """Disk space for the tokens of streamed data; they take the place of the ones used least recently."""
    dataset_num_proc: Annotated[int | None, Optionally] = option("data", None, "processes", ge=1, le=4096)
    """Number of tokenization processes; default: one per core, a single one for small data."""
    cache_dir: Annotated[str | None, Optionally] = option("data", None)
    """Folder for tokenized data; default: `tunesmith` in the user's cache folder."""
