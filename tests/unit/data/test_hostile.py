"""Tokenizers that take too much, or are no files: one sentence, in a process that goes on."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys

import pytest

from tests.unit.data.test_support import ROOT, chat, configure, write_jsonl
from trainers.config.mistakes import ConfigError
from trainers.data.prepare import load_tokenizer, prepare
from trainers.run.process_limits import at_a_limit

NAMES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def doubling(pattern, times):
    """A normalizer that writes a text twice as long for each of its steps."""
    step = {"type": "Replace", "pattern": {"String": pattern}, "content": pattern * 2}
    return {"type": "Sequence", "normalizers": [step] * times}


def change(folder, **parts):
    """Changes parts of a tokenizer.json."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **parts}))


def a_config(tmp_path, rows=3, **options):
    data = write_jsonl(tmp_path / "data.jsonl", [chat("hi", "ho")] * rows)
    return configure(tmp_path, data, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ask", [load_tokenizer, lambda config: prepare(config, "train")])
def test_a_pipe_in_place_of_a_file_is_named_and_blocks_nobody(tmp_path, name, ask):
    config = a_config(tmp_path)
    (tmp_path / "model" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "model" / name)
    with pytest.raises(ConfigError, match=rf"{name} is not a regular file; download or save"):
        ask(config)


def test_a_template_of_gigabytes_is_not_read(tmp_path):
    config = a_config(tmp_path)
    with (tmp_path / "model" / "chat_template.jinja").open("wb") as file:
        file.truncate(50 << 30)  # holes: nothing is on the disk
    with pytest.raises(ConfigError, match=r"chat_template\.jinja is larger than 1,000,000 bytes"):
        prepare(config, "train")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_brackets_a_hundred_thousand_deep_are_one_sentence(tmp_path, name):
    config = a_config(tmp_path)
    (tmp_path / "model" / name).write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ConfigError, match="cannot load the tokenizer of") as refused:
        load_tokenizer(config)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[]", "a JSON list, not an object"),
        ('"x"', "a JSON str, not an object"),
        ('{"model_type": "llama", "dtype": "auto"}', "its dtype is 'auto', not one of torch such as 'bfloat16'"),
    ],
)
def test_a_config_that_stops_the_tokenizer_is_blamed_itself(tmp_path, content, problem):
    """Control: beside a config that describes a model, the tokenizer is loaded."""
    config, file = a_config(tmp_path), tmp_path / "model" / "config.json"
    file.write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    assert load_tokenizer(config).eos_token
    file.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(f"its config.json describes no model ({problem}); correct it")):
        load_tokenizer(config)


def test_a_tokenizer_that_writes_terabytes_is_refused_and_this_process_goes_on(tmp_path):
    config = a_config(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_AS)
    change(tmp_path / "model", normalizer=doubling("a", 40))
    with pytest.raises(ConfigError, match="takes too much memory; download the model again") as refused:
        load_tokenizer(config)
    assert "\n" not in str(refused.value)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    change(tmp_path / "model", normalizer=doubling("a", 4))  # the control: sixteen letters for one
    assert len(load_tokenizer(config)("a", add_special_tokens=False)["input_ids"]) == 16


BIG = "q" * 2000


@pytest.mark.parametrize(("times", "why"), [(40, "takes too much memory"), (3, None)])
def test_rows_that_a_tokenizer_blows_up_end_its_process_alone(tmp_path, times, why):
    data = write_jsonl(tmp_path / "data.jsonl", [chat("hi", BIG)] * 3)
    config = configure(tmp_path, data, overlong="truncate")
    change(tmp_path / "model", normalizer=doubling("qq", times))  # words without a q are as they were
    load_tokenizer(config)
    if why is None:  # the control
        assert prepare(config, "train").report.longest > 2000 * 2**times
        return
    with pytest.raises(
        ConfigError, match=rf"tokenizer or chat template of .* {why} on a few rows; use a model"
    ) as told:
        prepare(config, "train")
    assert "\n" not in str(told.value)


def test_what_takes_too_long_within_one_call_is_ended_by_the_system():
    code = "import sys\nfrom trainers.run.process_limits import time_limit\n"
    code += "with time_limit(1.0):\n    max(range(int(sys.argv[1])))"
    run = [sys.executable, "-c", code]
    done = [subprocess.run([*run, size], cwd=ROOT, check=False, timeout=60).returncode for size in ("10", str(10**12))]
    assert [at_a_limit(status, "") for status in done] == [None, "takes too much processor time"]


def test_a_long_honest_row_passes(tmp_path):
    data = write_jsonl(tmp_path / "data.jsonl", [chat("hi", "a long reply " * 80_000)])
    found = prepare(configure(tmp_path, data, overlong="split"), "train")
    assert found.report.tokens > 1_000_000
