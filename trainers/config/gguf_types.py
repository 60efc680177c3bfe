"""The types of GGUF files that `tunesmith export --gguf` writes, and the checks of its options. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from trainers.config.mistakes import ConfigError, nearest

CONVERTER = "convert_hf_to_gguf.py"
"""llama.cpp's converter, in the root of its source."""
PLAIN = {"f32": 32.0, "bf16": 16.0, "f16": 16.0}
"""Types that the converter writes, with bits per weight."""
QUANTISED = {"q8_0": 8.5, "q6_k": 6.6, "q5_k_m": 5.7, "q4_k_m": 4.9, "q4_0": 4.7, "q3_k_m": 4.0, "q2_k": 3.4}
"""Types that llama.cpp's quantiser makes of them, with about as many bits per weight, the larger tensors' share
included. Those that need an importance matrix are left out."""
LLAMA_CPP = "TUNESMITH_LLAMA_CPP"
"""Names the variable with the folder of llama.cpp's source. Its converter runs, so no page may name another."""
PACKAGE = "llama-cpp-python"
INSTALL = "pip install 'tunesmith[gguf]'"
CLONE = "git clone https://github.com/ggml-org/llama.cpp"
_SOURCE = "a folder with the source of llama.cpp, such as a clone of github.com/ggml-org/llama.cpp"


@dataclass(frozen=True)
class GgufRequest:
    """The GGUF files to write beside an export.

    Args:
        types: Their types, such as `q4_k_m`, in the order of the request.
        llama_cpp: Absolute path of the source of llama.cpp.
    """

    types: tuple[str, ...]
    llama_cpp: Path

    def bytes_needed(self, weights: float, export_type: str) -> float:
        """Disk space of the files, with the one that others are quantised from.

        Args:
            weights: Number of weights.
            export_type: The type of the same dtype as the export.
        """
        bits = {name: {**PLAIN, **QUANTISED}[name] for name in [*self.types, *self.source(export_type)]}
        return weights * sum(bits.values()) / 8

    def source(self, export_type: str) -> list[str]:
        """The type that the others are made of or compared with, which loses nothing of the export; or nothing."""
        return [export_type] if set(self.types) & set(QUANTISED) else []


def gguf_request(types: str | None, llama_cpp: Path | None) -> GgufRequest | None:
    """Checks `--gguf` and `--llama_cpp`; None without them.

    Args:
        types: Types with commas between them, in upper or lower case.
        llama_cpp: The folder of llama.cpp's source; default: that of the environment.

    Raises:
        ConfigError: If a type is unknown, the folder has no converter, or a package is missing.
    """
    if types is None:
        if llama_cpp is not None:
            raise ConfigError.about("--llama_cpp", llama_cpp, "is used with --gguf only", "add --gguf q8_0")
        return None
    names = tuple(dict.fromkeys(name.strip().lower() for name in types.split(",") if name.strip()))
    known = [*PLAIN, *QUANTISED]
    if not names:
        raise ConfigError.about("--gguf", repr(types), "names no type", f"use {', '.join(known)}")
    for name in names:
        if name not in known:
            raise ConfigError.about("--gguf", name, "is unknown", nearest(name, known, f"use {', '.join(known)}"))
    llama_cpp = llama_cpp or llama_cpp_folder()
    if llama_cpp is None:
        problem = f"needs llama.cpp's own converter ({CONVERTER}), which no package index has by itself"
        raise ConfigError.about("--gguf", types, problem, f"name {_SOURCE}, with --llama_cpp DIR or {LLAMA_CPP}")
    folder = llama_cpp.expanduser().absolute()
    if not (folder / CONVERTER).is_file():
        raise ConfigError.about("--llama_cpp", llama_cpp, f"has no {CONVERTER}", f"name {_SOURCE}")
    _refuse_missing(names)
    return GgufRequest(names, folder)


def llama_cpp_folder() -> Path | None:
    """The folder of llama.cpp's source that the environment names."""
    return Path(folder) if (folder := os.environ.get(LLAMA_CPP)) else None


def offered_types() -> tuple[list[str], str]:
    """The types that can be written in this environment, and what is missing for the others, as a clause."""
    try:
        gguf_request(next(iter(PLAIN)), None)
    except ConfigError:
        source = f"run `{CLONE}` and `{INSTALL}`, and set `{LLAMA_CPP}` to that folder before the server starts"
        return [], f"they need llama.cpp's own converter; {source}"
    if not has_llama_cpp():
        return [*PLAIN], f"quantised types need `{INSTALL}`, which compiles llama.cpp in some minutes"
    return [*PLAIN, *QUANTISED], ""


def has_llama_cpp() -> bool:
    """Whether the quantiser and the library that reads GGUF files are installed."""
    return importlib.util.find_spec("llama_cpp") is not None


def _refuse_missing(names: tuple[str, ...]) -> None:
    """Raises ConfigError if a package is missing that the converter or the quantiser needs."""
    quantised = [name for name in names if name in QUANTISED]
    missing = ["sentencepiece"] if importlib.util.find_spec("sentencepiece") is None else []
    missing += [PACKAGE] if quantised and not has_llama_cpp() else []
    if not missing:
        return
    alone = [name for name in names if name in PLAIN]
    compiles = ", which compiles llama.cpp in some minutes" if PACKAGE in missing else ""
    remedy = f"run `{INSTALL}`{compiles}"
    remedy += f", or ask for --gguf {','.join(alone)} alone" if alone and missing == [PACKAGE] else ""
    raise ConfigError.about("--gguf", ",".join(names), f"needs {' and '.join(missing)}", remedy)
