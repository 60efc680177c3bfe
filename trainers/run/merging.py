"""What `tunesmith merge` can do, the request that its program reads, and what the result records. Imports no torch.

Methods have the names that peft gives them. Of full weights, each tensor is merged; of adapters, either the updates
that they are (`cat`, and what ends with `svd`), or their factors A and B, each for itself (the others).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainers.run.lineage import MERGE, Stage

REQUEST, RESULT = "request.json", "result"
"""File with the request and folder of the result, in the folder that the program works in."""
LINEAR, CAT = "linear", "cat"
METHODS: Mapping[str, str] = {
    LINEAR: "the weighted sum; of adapters, of their factors A and B, so that the product has mixed terms too",
    CAT: "the exact weighted sum of the updates; the rank is the sum of the ranks",
    "svd": "the closest adapter of a rank to the weighted sum of the updates",
    "ties": "the largest differences from the base, where their signs agree (TIES)",
    "ties_svd": "TIES of the updates, as the closest adapter of a rank",
    "dare_linear": "the weighted sum of random differences from the base, the kept ones scaled up (DARE)",
    "dare_linear_svd": "DARE of the updates, as the closest adapter of a rank",
    "dare_ties": "random differences from the base, the kept ones scaled up, where their signs agree (DARE, TIES)",
    "dare_ties_svd": "DARE and TIES of the updates, as the closest adapter of a rank",
}
"""What each method makes."""
FULL_METHODS = (LINEAR, "ties", "dare_linear", "dare_ties")
"""Methods for full weights; adapters have all."""
FACTOR_METHODS = FULL_METHODS
"""Methods that merge the factors of adapters, which must have equal shapes."""
RANK_METHODS = tuple(name for name in METHODS if name.endswith("svd"))
"""Methods whose result has a rank of one's choice."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


def prunes(method: str) -> bool:
    """Whether a method keeps only a share of the values, its density."""
    return "ties" in method or "dare" in method


def draws(method: str) -> bool:
    """Whether a method draws random numbers."""
    return "dare" in method


def default_weight(method: str, count: int) -> float:
    """The weight of each of `count` models: their mean. TIES takes the mean of what it keeps by itself."""
    return 1.0 if "ties" in method else 1.0 / count


@dataclass(frozen=True)
class MergedModel:
    """One of the models to merge.

    Args:
        name: As the user named it, without folders.
        folder: Its adapter or full weights.
        weight: Its weight in the sum.
    """

    name: str
    folder: str
    weight: float


@dataclass(frozen=True)
class MergeRequest:
    """What the program `trainers.tools.merge` is to do.

    Args:
        models: The models.
        method: One of `METHODS`.
        is_adapter: Whether all of them are adapters; otherwise all are full weights.
        base: Hub id or folder of the base model; empty if unknown.
        revision: Its branch, tag or commit on the Hub; empty for none.
        needs_base: Whether differences from the base are merged, so that its weights are read.
        density: Share of the values to keep, in (0, 1]; None for a method that keeps all.
        seed: For the methods that draw.
        rank: Rank of the result of a method in `RANK_METHODS`; None for the largest rank of the adapters.
        dtype: Dtype of the result, such as `bfloat16`; `auto` for that of the first model (adapters: float32).
        like_base: Whether `auto` is the dtype of the base's files instead: checkpoints are exported in fp32.
        title: Name of the result.
        command: The command line that repeats it.
    """

    models: Sequence[MergedModel]
    method: str
    is_adapter: bool
    base: str = ""
    revision: str = ""
    needs_base: bool = False
    density: float | None = None
    seed: int = 0
    rank: int | None = None
    dtype: str = "auto"
    like_base: bool = False
    title: str = "merged"
    command: Sequence[str] = ()

    def write(self, path: Path) -> None:
        """Writes it to a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> MergeRequest:
        """Reads what `write` has written."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**values, "models": [MergedModel(**model) for model in values["models"]]})

    @property
    def weights(self) -> list[float]:
        return [model.weight for model in self.models]


@dataclass(frozen=True)
class Merge:
    """How merged weights came to be, for the record and the model card of the result.

    Args:
        method: One of `METHODS`.
        models: Of each model its `name` and `weight`, the `stages` that led to it, and the sha256 of its weight
            `files`, by name.
        density, seed: See `MergeRequest`; None for a method that has none.
        rank: Largest rank of the resulting adapter; None for full weights.
        deviation: Norm of the difference from the exact weighted sum of the updates, relative to that sum; None for a
            method that does not approximate it.
        command: The command line that repeats it.
    """

    method: str
    models: Sequence[Mapping[str, Any]]
    density: float | None = None
    seed: int | None = None
    rank: int | None = None
    deviation: float | None = None
    command: Sequence[str] = field(default_factory=tuple)

    def as_json(self) -> dict[str, Any]:
        """The content of the record's key `merge`; facts that the method does not have are left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def merge_stage(request: MergeRequest) -> Stage:
    """The stage that a merge is in the history of what is trained from its result."""
    names = " + ".join(model.name for model in request.models)
    return Stage(request.title, MERGE, request.method, names, None, request.base)
