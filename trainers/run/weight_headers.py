"""Reads names, dtypes and shapes of weights from headers of safetensors files, local or on the Hub. No torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.config.mistakes import ConfigError
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.embedded import BASE_DIR
from trainers.run.json_file import MAX_BYTES, load_json, open_file, parse_json

Headers = dict[str, tuple[str, list[int]]]
"""Maps each name to its dtype (as named by safetensors) and its shape."""
ADAPTER_AS_MODEL = "holds an adapter, not a full model; start from it with from_run, merge it, or use its base model"
"""`Mistake.problem` of an adapter folder given as the base model."""
WEIGHTS_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError)
_BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
         "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
         "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}  # fmt: skip


def read_header(path: Path) -> Headers:
    """Reads dtypes and shapes from the header of a safetensors file.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged or truncated, or its header is too long.
    """
    return {name: (dtype, shape) for name, (dtype, shape, _) in read_places(path).items()}


def read_places(path: Path) -> dict[str, tuple[str, list[int], int]]:
    """Reads the header of a safetensors file, which consists of the header's length, JSON, and the tensor data.

    Returns:
        Dtype, shape and position of the first byte in the file of each tensor, by name.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged or truncated, its header is too long, or Git LFS left a pointer to it.
    """
    with open_file(path) as file:
        start = file.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            raise ValueError(f"{path.name} is a pointer of Git LFS, which `git lfs pull` replaces by the weights")
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(start[:8], "little")
        file.seek(8)
        content = file.read(length) if length <= min(size - 8, MAX_BYTES) else b""
    try:
        header = parse_json(content)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise _damaged(path.name)
    header.pop("__metadata__", None)
    headers, data_bytes = _layout(header, path.name)
    if 8 + length + data_bytes != size:  # a truncated download has a valid header, but too few bytes
        raise _damaged(path.name)
    return {name: (*entry, 8 + length + header[name]["data_offsets"][0]) for name, entry in headers.items()}


def _layout(header: Mapping[str, Any], file: str) -> tuple[Headers, int]:
    """Checks that tensors follow one another without gaps, each of the size that dtype and shape imply.

    Args:
        header: `dtype`, `shape` and `data_offsets` by tensor name.
        file: Name of the file.

    Returns:
        The headers, and the number of bytes of tensor data.

    Raises:
        ValueError: If they do not, or an entry is not of this form.
    """
    position = 0
    try:
        for entry in sorted(header.values(), key=lambda entry: tuple(entry["data_offsets"])):
            first, last = entry["data_offsets"]
            whole_numbers = all(type(size) is int and size >= 0 for size in (first, last, *entry["shape"]))
            bits = _BITS[entry["dtype"]] * math.prod(entry["shape"])
            if not whole_numbers or first != position or (last - first) * 8 != bits:
                raise _damaged(file)
            position = last
        return {name: (entry["dtype"], list(entry["shape"])) for name, entry in header.items()}, position
    except (KeyError, TypeError, ValueError):
        raise _damaged(file) from None


def _damaged(file: str) -> ValueError:
    return ValueError(f"{file} is damaged or truncated")


def _merged(files: Mapping[str, Headers]) -> Headers:
    """Merges the headers of a model's files.

    Raises:
        ValueError: If two files have a tensor of the same name, of which only one would be loaded.
    """
    merged: Headers = {}
    holders: dict[str, str] = {}
    for file, headers in files.items():
        for name in headers:
            if holders.setdefault(name, file) != file:
                first, second = sorted((holders[name], file))
                raise ValueError(f"{name} is in both {first} and {second}")
        merged |= headers
    return merged


def read_headers(folder: Path) -> Headers:
    """Reads names, dtypes and shapes from the weight files in a folder that transformers would load.

    Raises:
        ConfigError: If a file is missing or damaged.
    """
    try:
        return _merged({path.name: read_header(path) for path in _files(folder)})
    except _DAMAGE as error:
        problem = f"{Path(error.filename).name} is missing" if isinstance(error, FileNotFoundError) else error
        raise ConfigError.about(
            "model_name_or_path",
            folder,
            f": its weight files cannot be used ({problem})",
            "download or save the model again",
        ) from None


def _files(folder: Path) -> list[Path]:
    """Returns the weight files that transformers would load, which may be missing; ValueError for a damaged index."""
    index, single = folder / INDEX_NAME, folder / WEIGHTS_NAME
    if single.is_file() or not index.exists():
        return [single]
    content = load_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{INDEX_NAME} has no weight_map, the file of each weight")
    return [folder / name for name in sorted(set(names.values()))]


def base_folder(config: TrainConfig) -> Path:
    """Returns the path of the base model if it is a folder; need not exist."""
    return BASE_DIR if config.model_name_or_path == EMBEDDED else Path(config.model_name_or_path).expanduser()


def cached_folder(config: TrainConfig) -> Path | None:
    """Returns the cache folder of a Hub model if its config and all its weights are downloaded; None otherwise."""
    from huggingface_hub import try_to_load_from_cache

    name, revision = config.model_name_or_path, config.model_revision
    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        folder = Path(cached).parent if isinstance(cached, str) else None
        files = _files(folder) if folder is not None else []
    except _DAMAGE:  # a name that the Hub does not allow, or a damaged index
        return None
    return folder if files and all(path.is_file() for path in files) else None


def hub_headers(config: TrainConfig) -> Headers | None:
    """Fetches only the headers of weight files on the Hub; None if the Hub is unreachable.

    Raises:
        ConfigError: If a file is damaged, or one listed in the index is missing.
    """
    from huggingface_hub import HfApi, errors

    name, revision = config.model_name_or_path, config.model_revision
    try:
        repository = HfApi().get_safetensors_metadata(name, revision=revision)
        sizes = {entry.path: getattr(entry, "size", 0) for entry in HfApi().list_repo_tree(name, revision=revision)}
        files = {}
        for file, metadata in repository.files_metadata.items():
            entries = {tensor: vars(info) for tensor, info in metadata.tensors.items()}
            files[file], data_bytes = _layout(entries, file)
            if sizes[file] < 8 + _least_length(entries) + data_bytes:
                raise _damaged(file)
        return _merged(files)
    except (errors.SafetensorsParsingError, errors.EntryNotFoundError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, errors.LocalEntryNotFoundError):  # the index could not be fetched
            return None
        problem = str(error).strip().partition("\n")[0][:200]
        if isinstance(error, errors.RemoteEntryNotFoundError):
            problem = f"{str(error.response.url).rpartition('/')[2]} is missing"
        raise ConfigError(
            f"model_name_or_path={name}: its weight files on the Hub cannot be used ({problem}); use another "
            "revision or model"
        ) from None
    except Exception:  # without a network, several libraries raise different errors; the run checks the files later
        return None


def _least_length(entries: Mapping[str, Mapping[str, Any]]) -> int:
    """The length of a header in bytes, without its padding and metadata, which the Hub client does not return."""
    header = {name: {key: entry[key] for key in ("dtype", "shape", "data_offsets")} for name, entry in entries.items()}
    return len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
