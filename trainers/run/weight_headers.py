"""Reads names, dtypes and shapes of weights from headers of safetensors files, local or on the Hub. No torch."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from trainers.config.mistakes import ConfigError
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.embedded import BASE_DIR
from trainers.run.json_file import MAX_BYTES, load_json, open_file, parse_json

Headers = dict[str, tuple[str, list[int]]]
"""Maps each name to its dtype (as named by safetensors) and its shape."""
ADAPTER_AS_MODEL = "holds an adapter, not a full model; merge it, use its base model, or resume the run that trained it"
"""`Mistake.problem` of an adapter folder given as the base model."""
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError)


def read_header(path: Path) -> dict[str, Any]:
    """Reads the header of a safetensors file, which consists of the header's length, JSON, and the tensor data.

    Returns:
        `dtype`, `shape` and `data_offsets` by tensor name.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged or truncated, or its header is too long.
    """
    with open_file(path) as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        if length > min(size - 8, MAX_BYTES):
            raise ValueError(f"{path.name} is damaged or cut short")
        header = parse_json(file.read(length))
    try:
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        # The tensor data must fill the file exactly: a truncated download has a valid header, but too few bytes.
        ends = [entry["data_offsets"] for entry in entries.values()]
        valid = all(0 <= start <= end for start, end in ends) and max(end for _, end in ends) + 8 + length == size
        valid = valid and all(isinstance(entry["dtype"], str) and math.prod(entry["shape"]) >= 0
                              for entry in entries.values())  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise ValueError(f"{path.name} is damaged or cut short")
    return entries


def read_headers(folder: Path) -> Headers:
    """Reads names, dtypes and shapes from the weight files in a folder that transformers would load.

    Raises:
        ConfigError: If a file is missing or damaged.
    """
    try:
        entries = [entry for path in _files(folder) for entry in read_header(path).items()]
    except _DAMAGE as error:
        raise ConfigError.about(
            "model_name_or_path",
            folder,
            f": its weight files are incomplete ({error})",
            "download or save the model again",
        ) from None
    return {name: (entry["dtype"], entry["shape"]) for name, entry in entries}


def _files(folder: Path) -> list[Path]:
    """Returns the weight files that transformers would load; those listed in an index may be missing."""
    index, single = folder / _INDEX, folder / _SINGLE
    if single.is_file():
        return [single]
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    return [folder / name for name in sorted(set(load_json(index)["weight_map"].values()))]


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

    name = config.model_name_or_path
    try:
        files = HfApi().get_safetensors_metadata(name, revision=config.model_revision)
    except (errors.SafetensorsParsingError, errors.EntryNotFoundError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, errors.LocalEntryNotFoundError):  # the index could not be fetched
            return None
        problem = str(error).strip().partition("\n")[0][:200]
        if isinstance(error, errors.RemoteEntryNotFoundError):
            problem = f"{str(error.response.url).rpartition('/')[2]} is missing"
        raise ConfigError(
            f"model_name_or_path={name}: its weight files on the Hub are incomplete ({problem}); use another "
            "revision or model"
        ) from None
    except Exception:  # without a network, several libraries raise different errors; the run checks the files later
        return None
    return {
        name: (tensor.dtype, list(tensor.shape))
        for file in files.files_metadata.values()
        for name, tensor in file.tensors.items()
    }
