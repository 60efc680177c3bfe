"""Metrics of one's own, in a process with limits."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from app.eval.own_metrics import OwnMetrics, check_own_metrics, own_metrics
from app.eval.rows import Row
from trainers.config.mistakes import ConfigError

ROWS = [
    Row(f"data:{at}", None, 1.0, 1, "Is it?", "yes", answer, True, 3) for at, answer in enumerate(["yes", "no, no"])
]


def write(folder: Path, body: str) -> str:
    (folder / "metric.py").write_text(body)
    return f"{folder / 'metric.py'}:f"


def values(name: str, timeout: float = 60) -> list[float]:
    check_own_metrics([name])
    with OwnMetrics([name], timeout) as own:
        return own.values(ROWS)[name]


def test_a_function_gets_the_texts_that_it_names(tmp_path: Path) -> None:
    assert values(write(tmp_path, "def f(answers):\n    return [len(a) for a in answers]\n")) == [3.0, 6.0]
    body = "def f(expected, prompts, answers, scale=2):\n    return [scale * (a == e) + len(p) "
    body += "for a, e, p in zip(answers, expected, prompts)]\n"
    assert values(write(tmp_path, body)) == [8.0, 6.0]


def test_a_process_answers_for_several_models(tmp_path: Path) -> None:
    name = write(tmp_path, "calls = []\ndef f(answers):\n    calls.append(1)\n    return [len(calls)] * len(answers)\n")
    with OwnMetrics([name]) as own:
        assert own.values([]) == {name: []}
        assert [own.values(ROWS)[name], own.values(ROWS[:1])[name]] == [[1.0, 1.0], [2.0]]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("def f(answers):\n    return [1.0]\n", "it gave 1 numbers for 2 answers"),
        ("def f(answers):\n    return [1.0, float('nan')]\n", "it gave 'nan', which is not a finite number"),
        ("def f(answers):\n    return [1.0, float('inf')]\n", "it gave 'inf', which is not a finite number"),
        ("def f(answers):\n    return 0.5\n", "TypeError: 'float' object is not iterable"),
        ("def f(answers):\n    raise KeyError('x')\n", "KeyError: 'x'; correct the function"),
        ("import absent_module\ndef f(answers):\n    return [1, 1]\n", "No module named 'absent_module'"),
        ("import os\ndef f(answers):\n    os._exit(7)\n", "the process of the metrics"),
        ("def f(answers):\n    return [len(bytearray(2**34)), 1]\n", "MemoryError"),
    ],
)
def test_what_gives_no_numbers_is_refused_with_its_name(body: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        values(write(tmp_path, body))
    assert sentence in str(caught.value)
    assert "metric.py:f" in str(caught.value)
    assert "reward" not in str(caught.value)


def test_one_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    name = write(tmp_path, "import time\ndef f(answers):\n    time.sleep(600)\n")
    with pytest.raises(ConfigError, match=r"metric\.py:f took more than 3 s for the answers of one model"):
        values(name, timeout=3)


def test_secrets_stay_out_of_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    out = tmp_path / "environment.json"
    body = "import json, os\ndef f(answers):\n    json.dump(dict(os.environ), open({!r}, 'w'))\n    return [0, 0]\n"
    assert values(write(tmp_path, body.format(str(out)))) == [0.0, 0.0]
    seen = json.loads(out.read_text())
    assert "secret" not in str(seen)
    assert seen["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("def g():\n    pass\n", "has no function f; its functions are g"),
        ("def f(:\n", "is no Python"),
        (
            "def f(completions):\n    pass\n",
            "has the parameter 'completions', which nothing fills; use prompts, answers",
        ),
        ("def f(answers, **more):\n    return more\n", "uses **more, which gets nothing"),
    ],
)
def test_a_file_that_cannot_be_called_is_refused_unrun(body: str, sentence: str, tmp_path: Path) -> None:
    name = write(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')\n{body}")
    with pytest.raises(ConfigError) as caught:
        check_own_metrics(["f1", name])
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(f"metrics={name}")
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_absent_is_refused(tmp_path: Path) -> None:
    name = f"{tmp_path / 'absent.py'}:f"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        check_own_metrics([name])
    assert own_metrics(["f1", name]) == [name]
