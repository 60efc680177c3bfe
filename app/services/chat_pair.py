"""Two conversations side by side: with a run's model and its base in one process, or with two models in two."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from app.services.chat import Chats, Target
from trainers.config.mistakes import ConfigError

PANES = ("first", "second")
Document = tuple[str, dict[str, Any]]
"""A pane, and a document of `Chats.ask`."""


class ChatPair:
    """The model processes of a server: of the chosen model, and of another one that it is compared with.

    Args:
        runs_dir: folder of run folders.
        roots: see `Chats`.
        remote_code: see `Chats`.
    """

    def __init__(self, runs_dir: Path, roots: Sequence[Path] | None = None, remote_code: bool = False):
        self.first = Chats(runs_dir, roots, remote_code)
        self.second = Chats(runs_dir, roots, remote_code)

    def open(self, target: Target, other: Target | Literal["base"] | None = None) -> Iterator[str]:
        """Loads what is not loaded yet, and yields each stage.

        Args:
            target: what answers in the first pane.
            other: what answers in the second: another model, the base of the first, or nothing.

        Raises:
            ConfigError: when it cannot be loaded, or memory does not suffice for both.
            WorkerDied: when a process ends.
        """
        if not isinstance(other, Target) and self.second.state()["loaded"]:
            self.second.free()
        yield from self.open_first(target)
        if isinstance(other, Target):
            yield from (f"second model: {stage}" for stage in self.second.open(other, beside=self.first))

    def open_first(self, target: Target) -> Iterator[str]:
        """Loads what answers in the first pane, beside what the second has. See `open`."""
        yield from self.first.open(target, beside=self.second)

    def sources(self, other: Target | Literal["base"] | None = None) -> dict[str, tuple[Chats, str]]:
        """The process and the side that answer in each pane; only panes that have one. See `open`."""
        loaded = self.first.state().get("sides", [])
        sources = {"first": (self.first, "tuned" if "tuned" in loaded else "base")}
        if isinstance(other, Target):
            sources["second"] = (self.second, "tuned" if "tuned" in self.second.state().get("sides", []) else "base")
        elif other == "base" and "tuned" in loaded:
            sources["second"] = (self.first, "base")
        return sources

    def ask(
        self, conversations: Mapping[str, Any], sources: Mapping[str, tuple[Chats, str]], **options: Any
    ) -> Iterator[Document]:
        """Streams an answer in each pane: at once from two processes, in turn from one.

        Args:
            conversations: messages by pane.
            sources: see `sources`.
            **options: of `Chats.ask`.

        Raises:
            ConfigError: for a wrong request; other panes are answered first.
            WorkerDied: when a process ends; other panes are answered first.
        """
        lanes: dict[int, list[str]] = {}
        for pane in conversations:
            lanes.setdefault(id(sources[pane][0]), []).append(pane)
        streams = [self._answers(panes, conversations, sources, options) for panes in lanes.values()]
        yield from streams[0] if len(streams) == 1 else self._at_once(streams)

    def _answers(
        self, panes: Sequence[str], conversations: Mapping[str, Any], sources: Mapping[str, tuple[Chats, str]],
        options: Mapping[str, Any],
    ) -> Iterator[Document]:  # fmt: skip
        for pane in panes:
            chats, side = sources[pane]
            for document in chats.ask(conversations[pane], side, **options):
                yield pane, document
                if document.get("finish") == "cancelled":
                    return

    def _at_once(self, streams: Sequence[Iterator[Document]]) -> Iterator[Document]:
        results: queue.SimpleQueue[Document | BaseException | None] = queue.SimpleQueue()
        abandoned = threading.Event()

        def read(stream: Any) -> None:
            try:
                with closing(stream):
                    for entry in stream:
                        if abandoned.is_set():
                            return
                        results.put(entry)
            except BaseException as error:  # raised again below
                results.put(error)
            finally:
                results.put(None)

        threads = [threading.Thread(target=read, args=(stream,), daemon=True) for stream in streams]
        for thread in threads:
            thread.start()
        errors: list[BaseException] = []
        try:
            for _ in threads:
                while (result := results.get()) is not None:
                    if isinstance(result, BaseException):
                        errors.append(result)
                    else:
                        yield result
        finally:
            abandoned.set()
            if any(thread.is_alive() for thread in threads):
                self.stop()
        if errors:
            raise errors[0]

    def stop(self) -> None:
        """Stops the current answers, if any."""
        self.first.stop()
        self.second.stop()

    def free(self) -> None:
        """Ends the processes, if any, and releases their GPUs."""
        self.first.free()
        self.second.free()

    def states(self) -> list[dict[str, Any]]:
        """See `Chats.state`; of the second process only while it is in use."""
        second = self.second.state()
        return [self.first.state(), *([second] if second["loaded"] or second["loading"] else [])]

    def other(self, name: Any, weights: Any, device: Any) -> Target | Literal["base"] | None:
        """What the second pane is asked for.

        Args:
            name: a run or a base model, `=base` for the base of the first, `=none` or empty for nothing.
            weights: a checkpoint or export of the run.
            device: see `Chats.target`.

        Raises:
            ConfigError: when it does not exist or may not be read.
        """
        if name in (None, "", "=none"):
            return None
        if name == "=base":
            return "base"
        if not isinstance(name, str):
            raise ConfigError("the model to compare with is not a name; choose one")
        return self.second.target(name, weights, device)
