"""Weights left in their files until a strategy has decided which parts of them this rank keeps.

`transformers` builds the model on the meta device and maps each tensor in the files to a weight; here it is handed
stand-ins, so that nothing is read. The strategy cuts the empty model, and `StoredTensor.read` then fills what is left
(`trainers/parallel/fill.py`), a chunk at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel, modeling_utils
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

from trainers.run.errors import TrainingError
from trainers.run.weight_headers import read_places

CHUNK = 2**25
"""Bytes to read at once where they cannot be read in place, as dtype, device or columns differ."""
TEACHER = "teacher."
"""Prefix of the names of a teacher's weights among those of the model that is trained."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Args:
        file: the file.
        name: its name there.
        dtype: its dtype there.
        shape: its shape.
        offset: position of its first byte in the file.
    """

    file: Path
    name: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int

    def read(self, target: torch.Tensor, part: tuple[slice, ...] = ()) -> None:
        """Reads a rectangle of the tensor, in the dtype and onto the device of `target`.

        Args:
            target: the contiguous tensor to fill, of the shape of the rectangle.
            part: a slice with start and stop for each dimension; empty for all of it.

        Raises:
            TrainingError: if the file has become shorter since its header was read.
        """
        if not target.numel():
            return
        shape = self.shape or torch.Size([1])
        rows, *others = part or (slice(0, size) for size in shape)
        row = math.prod(shape[1:]) * self.dtype.itemsize
        full_rows = all(side == slice(0, size) for side, size in zip(others, shape[1:], strict=True))
        in_place = full_rows and target.dtype == self.dtype and target.device.type == "cpu"
        count = rows.stop - rows.start if in_place else max(1, CHUNK // row)
        flat = target.detach().view(rows.stop - rows.start, *target.shape[1:])
        with self.file.open("rb", buffering=0) as file:
            for start in range(rows.start, rows.stop, count):
                stop = min(start + count, rows.stop)
                into = flat[start - rows.start : stop - rows.start]
                buffer = into if in_place else torch.empty((stop - start, *shape[1:]), dtype=self.dtype)
                self._read_bytes(file, self.offset + start * row, buffer)
                if not in_place:
                    into.copy_(buffer[(slice(None), *others)])

    def _read_bytes(self, file: Any, offset: int, buffer: torch.Tensor) -> None:
        left: Any = memoryview(buffer.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        file.seek(offset)
        while left:  # one call reads at most 2 GiB
            count = file.readinto(left)
            if not count:
                raise TrainingError(f"{self.file} ended while {self.name} was read; something else is writing to it")
            left = left[count:]

    def mapped(self) -> torch.Tensor:
        """The tensor as the file has it, of which only what is used is read."""
        with safe_open(self.file, framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(self.name)
        return tensor


@dataclass(frozen=True)
class ConvertedTensor:
    """A weight that transformers computes from tensors in the files, such as the experts of a layer from each of them.

    Args:
        converter: what computes it.
        layer: the name that transformers calls it with.
        options: the other arguments of that call.
        pieces: the tensors that it takes, by their patterns, each with its dtype in the model.
        name: name of the weight among the results.
        shape: its shape.
    """

    converter: WeightConverter
    layer: str
    options: dict[str, Any]
    pieces: dict[str, list[tuple[StoredTensor, torch.dtype]]]
    name: str
    shape: torch.Size

    def mapped(self) -> torch.Tensor:
        """The weight, computed from all of its pieces."""
        return self._computed(self.pieces, self.shape)

    def read(self, target: torch.Tensor, part: tuple[slice, ...] = ()) -> None:
        """See `StoredTensor.read`; reads the experts in the rectangle alone, some at a time.

        Where the weight is no stack of them, all of it is in memory for a moment.
        """
        if not target.numel():
            return
        if not self._stacks_pieces():
            target.detach().copy_(self.mapped()[part])
            return
        rows, *others = part or (slice(0, size) for size in self.shape)
        count = max(1, CHUNK // (self.shape[1:].numel() * target.element_size()))
        for start in range(rows.start, rows.stop, count):
            stop = min(start + count, rows.stop)
            pieces = {pattern: each[start:stop] for pattern, each in self.pieces.items()}
            computed = self._computed(pieces, torch.Size([stop - start, *self.shape[1:]]))
            target.detach()[start - rows.start : stop - rows.start].copy_(computed[(slice(None), *others)])

    def _computed(self, pieces: dict[str, list[tuple[StoredTensor, torch.dtype]]], shape: torch.Size) -> torch.Tensor:
        for pattern, each in pieces.items():
            self.converter.collected_tensors[pattern] = [_read_full(*piece) for piece in each]
        # Some conversions look at the weight, which a strategy may have cut since.
        options = {**self.options, "model": _AsBuilt(self.options.get("model"), shape)}
        return _first(self.converter.convert(self.layer, **options)[self.name])

    def _stacks_pieces(self) -> bool:
        """Whether each row of the weight is computed from one tensor of each pattern, as each expert's is."""
        first, *others = self.converter.operations
        apart = all(
            (isinstance(step, Concatenate) and step.dim > 0)
            or (isinstance(step, Transpose) and min(step.dim0, step.dim1) > 0)
            for step in others
        )
        stacks = isinstance(first, MergeModulelist) and first.dim == 0
        return stacks and apart and all(len(each) == self.shape[0] for each in self.pieces.values())


class _AsBuilt:
    """A model whose weights all seem to have one shape, that of the one which is computed."""

    def __init__(self, model: Any, shape: torch.Size):
        self.model, self.shape = model, shape

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self.shape, device="meta")


@dataclass(frozen=True)
class NormsOf:
    """The norms of a stored matrix, which the magnitudes of DoRA begin with, in peft's arithmetic.

    Args:
        matrix: where the matrix comes from.
        dtype: its dtype in the model.
        dim: 1 for the norms of its rows, 0 for those of its columns.
    """

    matrix: Source
    dtype: torch.dtype
    dim: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self.matrix.shape[1 - self.dim]])

    def mapped(self) -> torch.Tensor:
        """All norms; the matrix is in memory for a moment."""
        matrix = torch.empty(self.matrix.shape, dtype=self.dtype)
        self.matrix.read(matrix)
        return torch.linalg.norm(matrix, dim=self.dim)

    def read(self, target: torch.Tensor, part: tuple[slice, ...] = ()) -> None:
        """See `StoredTensor.read`."""
        if target.numel():
            target.detach().copy_(self.mapped()[part])


@dataclass(frozen=True)
class Between:
    """A point on the line through two stored tensors.

    Args:
        start, end: the tensors, in fp32.
        share: 0 for the first, 1 for the second; may be outside.
    """

    start: StoredTensor
    end: StoredTensor
    share: float

    @property
    def shape(self) -> torch.Size:
        return self.start.shape

    def mapped(self) -> torch.Tensor:
        """The weight; both tensors are in memory for a moment."""
        return self.start.mapped().lerp(self.end.mapped(), self.share)

    def read(self, target: torch.Tensor, part: tuple[slice, ...] = ()) -> None:
        """See `StoredTensor.read`."""
        if target.numel():
            target.detach().copy_(self.mapped()[part])


class Source(Protocol):
    """Where a weight comes from."""

    @property
    def shape(self) -> torch.Size: ...

    def read(self, target: torch.Tensor, part: tuple[slice, ...] = ()) -> None:
        """See `StoredTensor.read`."""

    def mapped(self) -> torch.Tensor:
        """The weight."""


def _read_full(source: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(source.shape, dtype=dtype)
    source.read(tensor)
    return tensor


def _first(result: Any) -> torch.Tensor:
    tensor: torch.Tensor = result[0] if isinstance(result, list) else result
    return tensor


def tensors_in(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name, without those in 8 bits or fewer that only quantised models have.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is damaged.
    """
    return {
        name: StoredTensor(file, name, DTYPES[dtype], torch.Size(shape), offset)
        for name, (dtype, shape, offset) in read_places(file).items()
        if dtype in DTYPES
    }


class _StandIn:
    """Takes the place of a slice of a safetensors file in transformers, which casts and keeps a meta tensor."""

    def __init__(self, tensor: StoredTensor, left: LeftInFiles):
        self.tensor, self.left = tensor, left

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, part: Any) -> _StandIn:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A meta tensor of the shape in the file, and the dtype in the model."""
        empty = torch.empty(self.tensor.shape, dtype=dtype or self.tensor.dtype, device="meta")
        self.left.note(empty, self.tensor)
        return empty


class LeftInFiles:
    """Records what a model that is built meanwhile would read."""

    def __init__(self) -> None:
        self.by_storage: dict[tuple[int, int], tuple[Source, torch.Tensor]] = {}

    def note(self, empty: torch.Tensor, source: Source) -> None:
        """Records the source of a meta tensor, which is kept so that no other storage gets its address."""
        self.by_storage[_storage_key(empty)] = (source, empty)

    def source(self, weight: torch.Tensor) -> Source | None:
        """Where a meta weight or buffer comes from; None if that is unknown."""
        source, _ = self.by_storage.get(_storage_key(weight), (None, None))
        return source if source is not None and source.shape == weight.shape else None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While active, `from_pretrained` leaves weights on the meta device."""
        open_file, convert = modeling_utils.safe_open, WeightConverter.convert

        def convert_empty(converter: Any, layer: str, **options: Any) -> Any:
            futures = dict(converter.collected_tensors)
            results = convert(converter, layer, **options)
            pieces = {pattern: [self._piece(future.result()) for future in each] for pattern, each in futures.items()}
            options.pop("loading_info", None)
            for name, result in results.items():
                empty = _first(result)
                self.note(empty, ConvertedTensor(converter, layer, options, pieces, name, empty.shape))
            return results

        modeling_utils.safe_open = lambda file, *args, **kwargs: _Opened(Path(file), self)
        WeightConverter.convert = convert_empty
        try:
            yield
        finally:
            modeling_utils.safe_open, WeightConverter.convert = open_file, convert

    def _piece(self, empty: torch.Tensor) -> tuple[StoredTensor, torch.dtype]:
        source = self.source(empty)
        assert isinstance(source, StoredTensor)
        return source, empty.dtype

    def sources(self, model: PreTrainedModel) -> dict[int, Source] | None:
        """Reads the buffers of a model and ties its weights.

        Returns:
            The source of each weight by its id; None if that of one is unknown, so that all must be loaded whole.
        """
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:
                    if (source := self.source(buffer)) is None:
                        return None
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
                    source.read(module._buffers[name])
        self._tie(model)
        by_id = {id(weight): self.source(weight) for weight in model.parameters() if weight.is_meta}
        return None if None in by_id.values() else {key: source for key, source in by_id.items() if source is not None}

    def _tie(self, model: Any) -> None:
        """Ties weights that the files hold twice if both are equal, as transformers does for those that it reads."""
        for target, source in list(model.all_tied_weights_keys.items()):
            tied, other = model.get_parameter_or_buffer(target), model.get_parameter_or_buffer(source)
            if tied is other:
                continue
            values = [self._value(weight) for weight in (tied, other)]
            if values[0].shape == values[1].shape and torch.equal(*values):
                parent, _, name = target.rpartition(".")
                setattr(model.get_submodule(parent), name, other)
            else:
                model.all_tied_weights_keys.pop(target)

    def _value(self, weight: torch.Tensor) -> torch.Tensor:
        source = self.source(weight)
        return weight if source is None else source.mapped()


def _storage_key(tensor: torch.Tensor) -> tuple[int, int]:
    """What two tensors of one model share only if they are the same."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


class _Opened:
    """A safetensors file with stand-ins for its tensors."""

    def __init__(self, file: Path, left: LeftInFiles):
        self.file, self.left = file, left
        self.tensors = tensors_in(file)
        with safe_open(file, framework="pt") as tensors:
            self.notes = tensors.metadata()

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *error: Any) -> None:
        return

    def metadata(self) -> dict[str, str] | None:
        return self.notes

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_slice(self, name: str) -> _StandIn:
        return _StandIn(self.tensors[name], self.left)


@contextmanager
def without_memory(model: nn.Module) -> Iterator[None]:
    """Makes meta weights CPU tensors of one element, expanded to their shapes.

    peft puts new adapters on the device of the base, and on the meta device they would lose their values.
    """
    stand_ins = []
    for weight in model.parameters():
        if weight.is_meta:
            expanded = torch.empty((), dtype=weight.dtype).expand(weight.shape)
            stand_ins.append((weight, replace(weight, nn.Parameter(expanded, weight.requires_grad))))
    try:
        yield
    finally:
        for weight, empty in stand_ins:
            empty.requires_grad_(weight.requires_grad)
            replace(weight, empty)


def replace(weight: nn.Parameter, fresh: nn.Parameter) -> nn.Parameter:
    """Gives a weight the tensor of another, keeping the object and its attributes; tied weights stay tied.

    Returns:
        The other parameter, which now has the tensor of the first.
    """
    fresh.__dict__.update(weight.__dict__)
    torch.utils.swap_tensors(weight, fresh)
    return fresh
