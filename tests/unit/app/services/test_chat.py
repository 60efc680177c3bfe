"""Chat outside the ranks: what is refused, what the one process holds and gives back, and the verb."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.cli import run_verb
from app.hardware import Gpu
from app.services import chat
from app.services.chat import Chats, weights_of
from app.services.chat_messages import (
    MAX_CHARACTERS,
    MAX_MESSAGES,
    SAMPLING,
    check_messages,
    check_sampling,
)
from app.services.rpc_client import WorkerDied
from trainers.config.mistakes import ConfigError
from trainers.run.device_locks import holders
from trainers.run.folder import RunFolder

HELLO = [{"role": "user", "content": "hello"}]
SHORT = {"max_new_tokens": 8}
GPU = Gpu(0, "GPU-00000000-fake", "Fake", 2**30)


def made_run(path: Path, *weights: str) -> RunFolder:
    """A run folder with empty checkpoints and exports, which nothing loads."""
    path.mkdir(parents=True)
    (path / "state.json").write_text(json.dumps({"id": path.name, "state": "done", "started_at": path.name}))
    for name in weights:
        folder = path / ("checkpoints" if name.startswith("step-") else "") / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    return RunFolder(path)


# -- what is refused -------------------------------------------------------------------------------------------------


def test_sampling_has_defaults_and_takes_words_for_numbers() -> None:
    assert check_sampling(None) == {name: option.default for name, option in SAMPLING.items()}
    given = check_sampling({"temperature": "0.7", "top_k": "40", "seed": 2**32 - 1})
    assert (given["temperature"], given["top_k"], given["seed"]) == (0.7, 40, 2**32 - 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", "nan"), ("temperature", float("inf")), ("temperature", True),
        ("temperature", [1]), ("top_p", 0), ("top_p", 1.1), ("top_k", 1.5), ("top_k", -1), ("max_new_tokens", 0),
        ("max_new_tokens", 10**9), ("repetition_penalty", 0), ("seed", 2**32), ("seed", "1; touch x"),
        ("seed", "9" * 5000), ("temperature", 10**400), ("num_beams", 4), ("x" * 300, 1),
    ],
)  # fmt: skip
def test_wrong_sampling_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name[:50]) as caught:
        check_sampling({name: value})
    assert all(len(line) < 300 for line in caught.value.lines)


def test_each_mistake_has_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        check_sampling({"temperature": 9, "seed": -1, "beams": 2})
    assert len(caught.value.lines) == 3
    with pytest.raises(ConfigError, match="not a mapping"):
        check_sampling([1])  # type: ignore[arg-type]


def test_messages_are_taken_with_their_system_prompt() -> None:
    turns = [*HELLO, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "\x00why?", "extra": 1}]
    assert check_messages(turns, "be brief") == [
        {"role": "system", "content": "be brief"},
        *turns[:2],
        {"role": "user", "content": "why?"},
    ]


@pytest.mark.parametrize(
    "messages",
    [
        None, [], "hello", {"role": "user"}, [None], ["x"], [{"role": "user"}], [{"role": "user", "content": 3}],
        [{"role": "user", "content": ["x"]}], [{"role": "tool", "content": "x"}], [{"role": ["user"], "content": "x"}],
        [{"role": "assistant", "content": "x"}], [{"role": "user", "content": " "}],
        [*HELLO, {"role": "system", "content": "x"}, *HELLO], [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": "x" * (MAX_CHARACTERS + 1)}], HELLO * (MAX_MESSAGES + 1),
    ],
)  # fmt: skip
def test_other_messages_are_refused(messages: Any) -> None:
    with pytest.raises(ConfigError):
        check_messages(messages)


def test_weights_are_the_export_then_checkpoints_newest_first(tmp_path: Path) -> None:
    ready = ("step-00000005", "model", "export-merged", "export-merged-failed", "step-00000010")
    run = made_run(tmp_path / "runs" / "a", *ready)
    (run.checkpoints / "bad-step-00000007").mkdir()
    (run.checkpoints / "step-00000011.tmp-0").mkdir()
    (run.path / "export-out").symlink_to(tmp_path)
    assert weights_of(run) == ["model", "step-00000010", "step-00000005", "export-merged"]
    assert weights_of(made_run(tmp_path / "runs" / "b")) == []


@pytest.mark.usefixtures("elsewhere")
def test_choices_are_the_runs_with_weights_newest_first(tmp_path: Path) -> None:
    for name in ("1", "2", "3"):
        made_run(tmp_path / "runs" / name, *(["model"] if name != "2" else []))
    assert [row["name"] for row in Chats(tmp_path / "runs").choices()] == ["3", "1"]


@pytest.mark.usefixtures("elsewhere")
def test_a_target_is_a_run_or_a_base_model(tmp_path: Path) -> None:
    run = made_run(tmp_path / "runs" / "a", "model", "step-00000005")
    for chats in (Chats(tmp_path / "runs", [tmp_path / "runs"]), Chats(tmp_path / "runs")):
        assert chats.target("a").weights == "model"
        assert chats.target("a", "step-00000005").request() == {"run_dir": str(run.path), "weights": "step-00000005"}
        assert chats.target("embedded").request() == {"model": "embedded", "revision": None}
        assert chats.target("someone/model", revision="main").request()["model"] == "someone/model"
    assert Chats(tmp_path / "runs").target(str(run.path)).run is not None


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    "wrong",
    [
        {"name": None}, {"name": ""}, {"name": 3}, {"name": "nothing"}, {"name": "../runs/a"}, {"name": "/etc"},
        {"name": "/etc/passwd"}, {"name": "..%2f..%2fetc"}, {"name": "~/x"}, {"name": "a\x00"}, {"name": "x" * 3000},
        {"name": "run; touch /tmp/x"}, {"name": "file:///etc/passwd"}, {"name": "a", "weights": "../../etc"},
        {"name": "a", "weights": "step-00000099"}, {"name": "a", "weights": ["model"]}, {"name": "empty"},
        {"name": "a", "device": "0; x"}, {"name": "a", "device": "cuda"}, {"name": "out"},
        {"name": "a/b", "revision": "x y"}, {"name": "embedded", "weights": "model"},
        {"name": "embedded", "revision": "main"}, {"name": "a", "revision": "main"},
    ],
)  # fmt: skip
def test_a_stranger_names_nothing_else(tmp_path: Path, wrong: dict[str, Any]) -> None:
    runs = tmp_path / "runs"
    made_run(runs / "a", "model")
    made_run(runs / "empty")
    (runs / "out").symlink_to(made_run(tmp_path / "elsewhere", "model").path)
    with pytest.raises(ConfigError):
        Chats(runs, [runs]).target(**wrong)


# -- the process -----------------------------------------------------------------------------------------------------


@pytest.fixture
def chats(tmp_path: Path, elsewhere: None) -> Iterator[Chats]:
    made = Chats(tmp_path / "runs", [tmp_path])
    try:
        yield made
    finally:
        made.free()


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_for(condition: Any, seconds: float = 30.0) -> None:
    """Returns once the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def answer(chats: Chats, **more: Any) -> str:
    """A short answer of the base."""
    documents = list(chats.ask(HELLO, "both", {**SHORT, **more}))
    return str(next(document["answer"] for document in documents if "answer" in document))


def test_a_process_is_loaded_answers_and_is_freed(chats: Chats) -> None:
    with pytest.raises(ConfigError, match="no model is loaded"):
        list(chats.ask(HELLO))
    stages = list(chats.open(chats.target("embedded")))
    assert "reading embedded" in stages
    state = chats.state()
    assert (state["loaded"], state["name"], state["sides"], state["device"]) == (True, "embedded", ["base"], "CPU")
    assert state["memory_bytes"] > 2**20
    assert answer(chats) == answer(chats)
    assert list(chats.open(chats.target("embedded"))) == [], "it is there already"
    assert chats.state()["pid"] == state["pid"]
    with pytest.raises(ConfigError, match="side='tuned' is not loaded"):
        list(chats.ask(HELLO, "tuned"))
    chats.free()
    chats.free()
    assert gone(state["pid"])
    assert not chats.state()["loaded"]


def test_a_process_that_is_killed_says_so_and_another_can_be_loaded(chats: Chats) -> None:
    list(chats.open(chats.target("embedded")))
    os.kill(chats.state()["pid"], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="exit status -9"):
        answer(chats)
    assert not chats.state()["loaded"]
    list(chats.open(chats.target("embedded")))
    assert answer(chats)


def test_freed_while_it_answers(chats: Chats) -> None:
    list(chats.open(chats.target("embedded")))
    documents = chats.ask(HELLO, "base", {"temperature": 5, "max_new_tokens": 900})
    next(documents)
    chats.free()
    with pytest.raises(ConfigError, match="was freed while it answered"):
        list(documents)


def test_a_stopped_answer_ends_both_sides(chats: Chats) -> None:
    list(chats.open(chats.target("embedded")))
    documents = chats.ask(HELLO, "both", {"temperature": 5, "max_new_tokens": 900})
    first = next(documents)
    with pytest.raises(ConfigError, match="is answering"):
        list(chats.open(chats.target("embedded", device="cpu")))
    chats.stop()
    assert [first, *documents][-1] == {"side": "base", "finish": "cancelled"}
    assert answer(chats)


def test_an_idle_process_ends_by_itself(tmp_path: Path, elsewhere: None) -> None:
    chats = Chats(tmp_path / "runs", idle=0.3)
    list(chats.open(chats.target("embedded")))
    pid = chats._worker.pid if chats._worker else 0
    wait_for(lambda: not chats.state()["loaded"])
    wait_for(lambda: gone(pid))


def test_its_gpu_is_held_while_it_is_loaded(chats: Chats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "find_gpus", lambda: [GPU])
    assert holders() == {}
    list(chats.open(chats.target("embedded")))
    assert holders()[GPU.uuid]["run"] == "chat with embedded"
    second = Chats(chats.runs_dir)
    with pytest.raises(ConfigError, match=r"no GPU is free to chat with embedded: .*held by chat with embedded"):
        list(second.open(second.target("embedded")))
    with pytest.raises(ConfigError, match="there is no such GPU"):
        list(second.open(second.target("embedded", device="7")))
    assert holders(), "a refusal frees nothing of others"
    chats.free()
    assert holders() == {}


def test_what_cannot_be_loaded_holds_nothing(chats: Chats, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(chat, "find_gpus", lambda: [GPU])
    run = made_run(tmp_path / "runs" / "a", "model")
    (run.path / "config.yaml").write_text("model_name_or_path: !!python/object/apply:os.system ['touch /tmp/x']\n")
    with pytest.raises(ConfigError):
        list(chats.open(chats.target("a")))
    assert holders() == {}
    assert not chats.state()["loaded"]
    list(chats.open(chats.target("embedded")))
    assert answer(chats)


# -- the verb --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("elsewhere")
def test_the_verb_answers_once_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["chat", "embedded", "--prompt", "hello", "--max_new_tokens", "8", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["run_dir"], document["checkpoint"], document["model"]) == (None, None, "embedded")
    assert document["tuned"] is None
    assert document["base"]["tokens"] <= 8
    assert set(document["base"]) == {"text", "finish", "prompt_tokens", "tokens", "seconds", "tokens_per_second"}


@pytest.mark.usefixtures("elsewhere")
def test_the_verb_talks_line_by_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    once = ["chat", "embedded", "--max_new_tokens", "8"]
    assert run_verb([*once, "--prompt", "hello"]) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nand again\n"))
    assert run_verb(once) == 0
    out = capsys.readouterr().out
    assert out.startswith(first)
    assert len(out) > len(first)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "there is no run 'nothing'"),
        (["embedded", "--json"], "add --prompt"),
        (["embedded", "--prompt", "x", "--temperature", "9", "--seed", "a"], "temperature='9' is out of range"),
        (["embedded", "--prompt", " "], "there is no message"),
        (["embedded", "--prompt", "x", "--device", "gpu"], "device='gpu' is unknown"),
        (["embedded", "--prompt", "x", "--checkpoint", "model"], "is not a run"),
    ],
)
def test_the_verb_refuses_what_is_wrong(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["chat", *words]) == 2
    assert said in capsys.readouterr().err
