"""Two conversations side by side, with real processes: who answers, in which order, on which GPU, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.hardware import Gpu
from app.services import chat
from app.services.chat import Chats
from app.services.chat_pair import ChatPair
from app.services.rpc_client import WorkerDied
from tests.parrot import make_parrot
from trainers.config.mistakes import ConfigError
from trainers.run.device_locks import holders

GPU = Gpu(0, "GPU-00000000-fake", "Fake", 2**30)
LONG = " ".join(f"number{number}" for number in range(1500))


@pytest.fixture(scope="module")
def parrots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models that answer what they are meant to, and one of each's many words."""
    folder = tmp_path_factory.mktemp("parrots")
    for name in ("red", "green"):
        make_parrot(folder / name, {"*": f"I am {name}.", "long": LONG})
    return folder


@pytest.fixture
def pair(parrots: Path, tmp_path: Path, elsewhere: None) -> Iterator[ChatPair]:
    chats = ChatPair(tmp_path / "runs", [parrots])
    yield chats
    chats.free()


def opened(pair: ChatPair, first: Path, second: Any = None) -> dict[str, tuple[Chats, str]]:
    """Loads models; returns what answers in each pane."""
    other = pair.other(str(second) if isinstance(second, Path) else second, None, "auto")
    list(pair.open(pair.first.target(str(first)), other))
    return pair.sources(other)


def conversations(sources: Mapping[str, Any], message: str = "hello") -> dict[str, Any]:
    return {pane: [{"role": "user", "content": message}] for pane in sources}


def answers(pair: ChatPair, sources: Mapping[str, Any], message: str = "hello") -> dict[str, str]:
    """The answer of each pane."""
    documents = pair.ask(conversations(sources, message), sources)
    return {pane: document["answer"] for pane, document in documents if "answer" in document}


def test_each_pane_has_its_model_and_what_is_not_compared_is_freed(pair: ChatPair, parrots: Path) -> None:
    sources = opened(pair, parrots / "red", parrots / "green")
    assert answers(pair, sources) == {"first": "I am red.", "second": "I am green."}
    assert [state["name"] for state in pair.states()] == [str(parrots / "red"), str(parrots / "green")]
    freed = pair.states()[1]["pid"]
    sources = opened(pair, parrots / "red", "=base")  # which a base model alone has not
    assert answers(pair, sources) == {"first": "I am red."}
    assert len(pair.states()) == 1
    assert not psutil.pid_exists(freed) or psutil.Process(freed).status() == psutil.STATUS_ZOMBIE


@pytest.mark.long
def test_both_stream_at_once_and_stop_together(pair: ChatPair, parrots: Path) -> None:
    sources = opened(pair, parrots / "red", parrots / "green")
    finishes, began = {}, set()
    for pane, document in pair.ask(conversations(sources, "long"), sources, sampling={"max_new_tokens": 2000}):
        began.add(pane)
        if len(began) == 2 and not finishes:
            pair.stop()
        if "finish" in document:
            finishes[pane] = document["finish"]
    assert finishes == {"first": "cancelled", "second": "cancelled"}
    stream = pair.ask(conversations(sources, "long"), sources, sampling={"max_new_tokens": 2000})
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # a tab that is closed
    assert answers(pair, sources) == {"first": "I am red.", "second": "I am green."}


@pytest.mark.long
def test_the_death_of_a_process_leaves_the_other_answer(pair: ChatPair, parrots: Path) -> None:
    sources = opened(pair, parrots / "red", parrots / "green")
    psutil.Process(pair.states()[1]["pid"]).kill()
    documents: list[Any] = []
    with pytest.raises(WorkerDied):
        documents.extend(pair.ask(conversations(sources), sources))  # what came before the error stays in the list
    assert [(pane, entry["answer"]) for pane, entry in documents if "answer" in entry] == [("first", "I am red.")]


@pytest.mark.long
def test_two_models_share_the_only_gpu_and_either_can_be_replaced(
    pair: ChatPair, parrots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU stays reserved until both have ended. The control: a third party gets none."""
    monkeypatch.setattr(chat, "find_gpus", lambda: [GPU])
    opened(pair, parrots / "red", parrots / "green")
    opened(pair, parrots / "green", parrots / "green")
    sources = opened(pair, parrots / "green", parrots / "red")
    assert answers(pair, sources) == {"first": "I am green.", "second": "I am red."}
    pair.first.free()
    assert GPU.uuid in holders()
    stranger = Chats(pair.first.runs_dir, [parrots])
    with pytest.raises(ConfigError, match="no GPU is free"):
        list(stranger.open(stranger.target(str(parrots / "red"))))
    list(pair.open_first(pair.first.target(str(parrots / "red"))))
    pair.free()
    assert holders() == {}


@pytest.mark.parametrize("wrong", [3, "nothing", "/etc", "=other", ["x"]])
def test_what_cannot_be_compared_with_is_refused(pair: ChatPair, wrong: Any) -> None:
    with pytest.raises(ConfigError):
        pair.other(wrong, None, "auto")
    assert pair.other("=none", None, "auto") is None
