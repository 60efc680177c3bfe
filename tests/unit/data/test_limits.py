"""What a chat template may cost: memory and time are bounded, and said, after the first few rows."""

from __future__ import annotations

import resource
import time

import pytest

from tests.unit.data.test_support import PLAIN, chat, save_tokenizer
from trainers.config.mistakes import ConfigError
from trainers.data.formats import canonical
from trainers.data.shards import BadRow
from trainers.data.template import Encoded, Encoder

DOCUMENT = canonical(chat("a", "b"), "chat", {}, True)


def encoder_of(tmp_path, template):
    from transformers import AutoTokenizer

    return Encoder.of(AutoTokenizer.from_pretrained(save_tokenizer(tmp_path / "model", template)), True)


@pytest.mark.parametrize("size", ["'a' * 10**8 * 3", "messages[0].content * 10**10", "[0] * 10**10"])
def test_a_template_that_takes_gigabytes_is_refused_and_the_process_goes_on(tmp_path, monkeypatch, size):
    monkeypatch.setattr("trainers.data.template.RENDER_BYTES", 200 << 20)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(ConfigError, match="takes over 200 MiB of memory for one conversation"):
        encoder_of(tmp_path, PLAIN + "{{ " + size + " }}").encode([DOCUMENT] * 9)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    fine = encoder_of(tmp_path, PLAIN + "{{ ('a' * 10**6)[:0] }}")  # the control
    assert isinstance(fine.encode([DOCUMENT])[0], Encoded)


def test_a_template_that_is_slow_for_every_row_is_refused_after_a_few(tmp_path, monkeypatch):
    monkeypatch.setattr("trainers.data.render_budget._GRACE_SECONDS", 0.3)
    slow = "{% for a in range(99999) %}{% for b in range(9) %}{% endfor %}{% endfor %}"
    began = time.thread_time()
    with pytest.raises(ConfigError, match="s for each conversation"):
        encoder_of(tmp_path, PLAIN + slow).encode([DOCUMENT] * 1000)
    assert time.thread_time() - began < 8
    fast = encoder_of(tmp_path, PLAIN)
    assert all(isinstance(item, Encoded) for item in fast.encode([DOCUMENT] * 1000))


def test_macros_that_call_themselves_are_refused(tmp_path, monkeypatch):
    endless = encoder_of(tmp_path, "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")
    assert isinstance(endless.encode([DOCUMENT])[0], BadRow)
    monkeypatch.setattr("trainers.data.template.RENDER_SECONDS", 0.2)
    twice = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    with pytest.raises(ConfigError, match="still runs after"):
        encoder_of(tmp_path, twice).encode([DOCUMENT])
