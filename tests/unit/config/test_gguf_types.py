"""`--gguf` and `--llama_cpp`: what is accepted, and what is refused with a way out."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from trainers.config import gguf_types
from trainers.config.gguf_types import CONVERTER, GgufRequest, gguf_request
from trainers.config.mistakes import ConfigError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder that has a converter."""
    (tmp_path / CONVERTER).touch()
    return tmp_path


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The packages that are found, which a test may change."""
    present = ["sentencepiece", "llama_cpp"]

    def find(name: str) -> ModuleType | None:
        return sys if name in present else None

    monkeypatch.setattr(gguf_types.importlib.util, "find_spec", find)
    return present


def test_types_in_any_case_and_order(source: Path, installed: list[str]) -> None:
    assert gguf_request(None, None) is None
    request = gguf_request(" Q4_K_M, f16,,q4_k_m", source)
    assert request == GgufRequest(("q4_k_m", "f16"), source)


@pytest.mark.parametrize(
    ("types", "folder", "line"),
    [
        ("q4_k_x", ".", "is unknown; did you mean q4_k_m?"),
        ("int4", ".", "is unknown; use f32, bf16"),
        (" , ", ".", "names no type"),
        ("f16", None, "name a folder with the source of llama.cpp"),
        ("f16", "elsewhere", f"has no {CONVERTER}"),
        (None, ".", "is used with --gguf only"),
    ],
)
def test_wrong_ones_are_refused(
    types: str | None, folder: str | None, line: str, source: Path, installed: list[str]
) -> None:
    with pytest.raises(ConfigError, match=line.replace("?", r"\?")):
        gguf_request(types, None if folder is None else source / folder)


def test_a_missing_package_is_named_with_the_line_that_installs_it(source: Path, installed: list[str]) -> None:
    installed.remove("llama_cpp")
    with pytest.raises(ConfigError, match=r"needs llama-cpp-python; run `pip install 'tunesmith\[gguf\]'`.*--gguf f16"):
        gguf_request("f16,q8_0", source)
    assert gguf_request("f16", source) is not None  # without it, plain types can be written
    installed.remove("sentencepiece")
    with pytest.raises(ConfigError, match="needs sentencepiece"):
        gguf_request("f16", source)


def test_the_space_counts_the_file_that_others_are_made_of() -> None:
    alone, both = GgufRequest(("q8_0",), Path("/x")), GgufRequest(("q8_0", "bf16"), Path("/x"))
    assert alone.bytes_needed(100, "bf16") == both.bytes_needed(100, "bf16") == 100 * 24.5 / 8
    assert GgufRequest(("f16",), Path("/x")).bytes_needed(100, "f32") == 200
