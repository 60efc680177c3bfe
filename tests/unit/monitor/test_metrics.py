"""Rates, schedule, the metrics file and the log: small things that everything else is read from."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from trainers.config.presets import model_presets
from trainers.model.sizes import matmul_parameters
from trainers.monitor import metrics
from trainers.monitor.metrics import MetricsFile, RecentPace, Window
from trainers.monitor.mfu import attention_width, peak_flops, step_flops
from trainers.run import log
from trainers.run.log import log_line, secrets_in


def test_flops_of_a_step_are_counted_by_hand() -> None:
    """6 per trained and 4 per frozen parameter and token, and causal attention over each document."""
    assert step_flops(100, (10, 20, 5), attention_width=8, squared_lengths=5000) == 100 * (60 + 80 + 10) + 6 * 8 * 5000


def test_matmul_parameters_are_the_linear_ones() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(50, 4), torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    model.append(torch.nn.Linear(3, 2).requires_grad_(False))
    assert matmul_parameters(model) == (12, 6)


@pytest.mark.parametrize(
    ("model", "width"),
    [("llama-3.1-8b", 32 * 32 * 128), ("qwen3-0.6b", 28 * 16 * 128), ("gemma-3-1b", 26 * 4 * 256),
     ("gemma-3-4b", 34 * 8 * 256)],
)  # fmt: skip
def test_attention_is_as_wide_as_its_heads(model: str, width: int) -> None:
    """Which is not the hidden size for Qwen3 0.6B and Gemma 3, whose 4B holds its language part in a larger config."""
    published = model_presets(model).model
    assert published
    assert attention_width(AutoConfig.for_model(**published.config)) == width


def test_attention_of_an_unknown_shape_counts_nothing() -> None:
    assert attention_width(None) == 0


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_is_that_of_the_whole_name(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0), torch.bfloat16) == peak


def test_no_mfu_on_a_cpu() -> None:
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_pauses_do_not_count_against_the_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 4.0, 5.0, 5.5, 6.0, 6.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    window = Window()
    with window.pause():  # 1 to 4: an evaluation
        pass
    with window.waiting():  # 5 to 5.5: waiting for data
        pass
    window.count(tokens=300, trained=150, flops=30.0)
    found = window.rates(peak=100.0)
    assert found == {"tokens_per_second": 100, "trained_tokens_per_second": 50, "mfu": 0.1, "data_wait": 0.5 / 3}


def windows(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> Iterator[RecentPace]:
    """The pace after each of these windows of one step of 100 tokens."""
    recent = RecentPace()
    for taken in seconds:
        monkeypatch.setattr(metrics.time, "perf_counter", lambda: 0.0)
        window = Window()
        window.count(tokens=100, trained=50, flops=1.0)
        monkeypatch.setattr(metrics.time, "perf_counter", lambda taken=taken: taken)
        recent.add(window)
        yield recent


def test_the_time_that_is_left_follows_no_single_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a second on a machine that others use: now and then one takes 40 s, now and then a tenth."""
    seconds = [40.0 if step % 17 == 5 else 0.1 if step % 13 == 7 else 1 + 0.1 * (step % 3) for step in range(120)]
    steady = [(one.step_seconds, one.tokens_per_second) for one in windows(monkeypatch, seconds)][5:]
    left = [step_seconds for step_seconds, _ in steady]
    assert max(left) / min(left) < 1.5
    assert max(rate for _, rate in steady) / min(rate for _, rate in steady) < 1.5
    assert max(seconds) / min(seconds) == 400, "the control: what one window alone says"


def test_the_first_window_alone_is_taken_as_it_is_and_a_lasting_change_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, *_ = [one.step_seconds for one in windows(monkeypatch, [3.0])]
    assert first == 3.0
    *_, last = [one.step_seconds for one in windows(monkeypatch, [1.0] * 60 + [2.0] * 50)]
    assert last == 2.0


def test_rows_carry_the_attempt_and_survive_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path, 0).write({"step": 1, "loss": 0.5})
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 2, "lo')  # a kill in the middle of a row
    MetricsFile(path, 1).write({"step": 2, "loss": float("nan")})
    path.write_text(path.read_text().removesuffix("\n"))  # a row that is whole but for its end is one
    MetricsFile(path, 2)
    assert path.read_text().endswith("}\n")
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {"step": 1, "attempt": 0, "loss": 0.5}
    assert second == {"step": 2, "attempt": 1, "loss": None}


def test_a_log_line_has_time_and_rank_and_no_secret() -> None:
    hidden = secrets_in({"HF_TOKEN": "hf_secret_value", "HOME": "/root/long/enough", "API_KEY": "short"})
    assert hidden == ["hf_secret_value"]
    urls = {
        "URI": "http://me:pa%20ss-word@host/x",
        "SHORT": "db://a:b@host",
        "SERVER": "http://h/?write_token=12345678&x=1",
    }
    assert secrets_in(urls) == ["me:pa%20ss-word@", "pa%20ss-word", "pa ss-word", "12345678", "a:b@"]
    assert secrets_in({"TIME": "12:30@noon", "PATH": "/a:/b", "URL": "http://host:8080/a@b?token="}) == []
    line = log_line("rank 1", "10%\r20%\rtoken hf_secret_value\n", hidden)
    assert line.endswith("[rank 1] token ***\n")
    assert line[:4].isdigit()


PROGRAM = """
import os, sys
from pathlib import Path
from trainers.run.log import start_tee
start_tee(Path(sys.argv[1]), "rank 3", echo=sys.argv[2] == "echo")
print("from python")
os.write(2, b"from C\\n")
os.write(1, b"x" * 200_000 + b"\\n" + bytes(range(128, 160)) + b"\\n")
os.abort()
"""


@pytest.mark.parametrize("echo", ["echo", "quiet"])
def test_the_last_words_of_a_crash_are_in_the_log(echo: str, tmp_path: Path) -> None:
    """Also what C code prints, a very long line and what is not UTF-8."""
    env = {**os.environ, "SOME_TOKEN": "from python"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path / "log.txt", echo], env=env, capture_output=True)
    assert done.returncode < 0
    text = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert "[rank 3] ***\n" in text
    assert "[rank 3] from C\n" in text
    assert text.count("x") == 200_000
    assert max(len(line) for line in text.splitlines()) < log.LONGEST_LINE + 100
    assert (b"from C" in done.stdout) == (echo == "echo")


@settings(max_examples=200)
@given(
    secret=st.text("abcéß€", min_size=8, max_size=20),
    before=st.integers(0, 3 * log.LONGEST_LINE),
    gap=st.integers(0, 30),
    filler=st.sampled_from("xé€"),
)
def test_no_piece_of_a_long_line_ends_in_a_secret_or_a_character(
    secret: str, before: int, gap: int, filler: str
) -> None:
    line = (filler * before + secret + "." * gap + secret + filler * log.LONGEST_LINE + "\n").encode()
    parts = list(log.pieces(io.BytesIO(line), [secret]))
    assert b"".join(parts) == line
    assert max(map(len, parts)) <= log.LONGEST_LINE + log.LONGEST_LINE // 2
    assert len(parts) > 1
    written = "".join(part.decode().replace(secret, "***") for part in parts)  # strict: no character is cut
    assert secret not in written


def test_pieces_of_one_size_would_show_a_secret() -> None:
    """Control."""
    line = "x" * (log.LONGEST_LINE - 4) + "hf_secret_token\n"
    blind = [line[: log.LONGEST_LINE], line[log.LONGEST_LINE :]]
    assert "hf_secret_token" in "".join(part.replace("hf_secret_token", "***") for part in blind)
    parts = list(log.pieces(io.BytesIO(line.encode()), ["hf_secret_token"]))
    assert b"***" in b"".join(part.replace(b"hf_secret_token", b"***") for part in parts)
