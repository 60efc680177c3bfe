"""Asks a judge behind an OpenAI-style URL: bounded in number, cost, time and concurrency, and nothing twice.

Replies are cached by a hash of the whole request, so that an evaluation that is repeated, or was killed, pays for none
again. The key comes from the environment, goes into one header, and to no other address: redirects are not followed,
and proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.console import clean, counted, number, say, shortened
from trainers.run.folder import cache_folder, write_atomic

API_KEY = "TUNESMITH_JUDGE_API_KEY"
"""Environment variable with the key of the judge; no option and no file holds it."""
CONCURRENT = 8
ATTEMPTS = 5
PAUSE = 1.0
"""Seconds before the second try; each further pause is twice as long."""
LONGEST_PAUSE = 60.0
TIMEOUT = 180.0
"""Seconds that a try may take."""
_MOST_BYTES = 4 * 2**20
_OF_ROW = frozenset({400, 413, 422})
"""Statuses that refuse a single request, such as one too long for the judge; others would meet the next one too."""


class JudgeGone(Exception):
    """The judge cannot be asked further; the text says why."""


@dataclass(frozen=True)
class Reply:
    """A judge's reply.

    Args:
        text: what it said; None if it refused this request.
        prompt_tokens: as the server counts them; None if it does not.
        completion_tokens: likewise.
    """

    text: str | None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass
class Usage:
    """What was asked and paid.

    Attributes:
        requests: replies that were paid for, in this evaluation.
        cached: replies from the cache.
        retries: tries that failed and were repeated.
        refused: requests that the judge refused one by one.
        unasked: requests that were not made, because of the limit or as the judge was gone.
        prompt_tokens: of the replies that were paid for.
        completion_tokens: likewise.
        uncounted: replies whose tokens the server did not count.
    """

    requests: int = 0
    cached: int = 0
    retries: int = 0
    refused: int = 0
    unasked: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    uncounted: int = 0

    def cost(self, price: tuple[float, float] | None) -> float | None:
        """What the replies cost, in the unit of the prices per million tokens; None without prices."""
        if price is None:
            return None
        return (self.prompt_tokens * price[0] + self.completion_tokens * price[1]) / 1e6

    def count(self, reply: Reply) -> None:
        """Counts a reply that was paid for."""
        self.requests += 1
        if reply.prompt_tokens is None or reply.completion_tokens is None:
            self.uncounted += 1
        self.prompt_tokens += reply.prompt_tokens or 0
        self.completion_tokens += reply.completion_tokens or 0


@dataclass
class JudgeServer:
    """A judge.

    Args:
        url: address up to `/v1`.
        model: name of the model there.
        key: sent as a bearer token; empty for none.
        price: of a million tokens in and out; None if unknown.
        limit: requests, at most.
        most_cost: cost at which no further request is made; None for any.
        cache: folder of the replies.
        quiet: whether to hide what will be asked.

    Attributes:
        usage: what was asked and paid.
        refusal: what the judge said to the first request that it refused by itself; empty without one.
        gone: why it cannot be asked further; empty while it can.
    """

    url: str
    model: str
    key: str = field(default="", repr=False)
    price: tuple[float, float] | None = None
    limit: int = 1000
    most_cost: float | None = None
    cache: Path = field(default_factory=lambda: cache_folder() / "judge")
    quiet: bool = False
    usage: Usage = field(default_factory=Usage)
    refusal: str = ""
    gone: str = ""

    def ask(self, conversations: Sequence[list[dict[str, str]]]) -> tuple[list[Reply | None], str | None]:
        """The replies to conversations, in their order.

        Returns:
            The replies, with None where none was asked for; and why the judge was gone, or None.
        """
        return asyncio.run(self._ask_all(conversations))

    def cached(self, messages: list[dict[str, str]]) -> Reply | None:
        """The reply in the cache; None if there is none that can be read."""
        try:
            saved = json.loads(self._file(messages).read_text(encoding="utf-8"))
            return Reply(saved["text"], saved["prompt_tokens"], saved["completion_tokens"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def _announce(self, conversations: Sequence[list[dict[str, str]]]) -> None:
        """Says what will be asked, before it is."""
        if self.quiet:
            return
        count = min(len(conversations), self.limit)
        tokens = sum(len(message["content"]) for messages in conversations[:count] for message in messages) // 4
        cost = "" if self.price is None else f", {number(tokens * self.price[0] / 1e6)} without the replies"
        say(clean(f"judge: {counted(count, 'request', 'requests')} to {self.model} at {self.url} (about {tokens:,} "
                  f"tokens{cost}); {self.usage.cached:,} replies are in the cache"))  # fmt: skip

    def _may_ask(self, started: int) -> bool:
        cost = self.usage.cost(self.price)
        return started < self.limit and (self.most_cost is None or cost is None or cost < self.most_cost)

    async def _ask_all(self, conversations: Sequence[list[dict[str, str]]]) -> tuple[list[Reply | None], str | None]:
        import httpx

        replies: list[Reply | None] = [self.cached(messages) for messages in conversations]
        self.usage.cached += sum(reply is not None for reply in replies)
        waiting = [index for index, reply in enumerate(replies) if reply is None]
        self._announce([conversations[index] for index in waiting])
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        started = 0

        async def work(client: httpx.AsyncClient) -> None:
            nonlocal started
            while waiting and not self.gone and self._may_ask(started):
                index, started = waiting.pop(0), started + 1
                try:
                    replies[index] = await self._reply(client, conversations[index])
                except JudgeGone as error:
                    self.gone = self.gone or str(error)
                    self.usage.unasked += 1

        # Neither proxies nor .netrc of the environment: the key goes to this address alone.
        client = httpx.AsyncClient(
            headers=headers, timeout=TIMEOUT, trust_env=False, follow_redirects=False,
            verify=self.url.startswith("https:"),
        )  # fmt: skip
        async with client:
            await asyncio.gather(*(work(client) for _ in range(CONCURRENT)))
        self.usage.unasked += len(waiting)
        return replies, self.gone or None

    async def _reply(self, client: Any, messages: list[dict[str, str]]) -> Reply:
        """Asks until there is a reply.

        Raises:
            JudgeGone: if there is none after all tries, or the judge refuses every request.
        """
        import httpx

        cause = ""
        for attempt in range(ATTEMPTS):
            try:
                async with asyncio.timeout(TIMEOUT):
                    status, body, wait = await self._post(client, messages)
            except (httpx.TransportError, TimeoutError) as error:
                cause, wait = f"{type(error).__name__}: {error}".rstrip(": "), 0.0
            else:
                if status == 200:
                    if (reply := self._parsed(body)) is not None:
                        self.usage.count(reply)
                        self._save(messages, reply)
                        return reply
                    cause = f"an answer that is no chat completion: {self._quoted(body)}"
                elif status in _OF_ROW:
                    self.usage.refused += 1
                    self.refusal = self.refusal or f"status {status}: {self._quoted(body)}"
                    return Reply(None)
                else:
                    cause = f"status {status}: {self._quoted(body)}"
                    if status < 500 and status not in (408, 409, 429):
                        break
            if attempt + 1 < ATTEMPTS:
                self.usage.retries += 1
                await asyncio.sleep(min(max(PAUSE * 2**attempt, wait), LONGEST_PAUSE))
        raise JudgeGone(f"the judge at {self.url} does not answer ({cause}); see the address, the model and {API_KEY}")

    async def _post(self, client: Any, messages: list[dict[str, str]]) -> tuple[int, str, float]:
        """Status, body, and the seconds that the server asks to wait."""
        received = bytearray()
        async with client.stream("POST", f"{self.url}/chat/completions", json=self._body(messages)) as response:
            async for part in response.aiter_bytes():
                received += part
                if len(received) > _MOST_BYTES:
                    return 200, "", 0.0  # no completion is as long
            pause = response.headers.get("retry-after", "")
            return response.status_code, received.decode(errors="replace"), float(pause) if pause.isdecimal() else 0.0

    def _body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        return {"model": self.model, "messages": messages, "temperature": 0}

    def _parsed(self, body: str) -> Reply | None:
        """The reply in a body; None if it is none. A key that the server repeats is removed."""
        try:
            values = json.loads(body)
            text = values["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            return None
        usage = values.get("usage")
        counts = [
            usage.get(name) if isinstance(usage, dict) else None for name in ("prompt_tokens", "completion_tokens")
        ]
        tokens = [count if type(count) is int and 0 <= count < 10**9 else None for count in counts]
        return Reply(self._without_key(text), *tokens) if isinstance(text, str) else None

    def _quoted(self, body: str) -> str:
        return repr(shortened(self._without_key(" ".join(body.split())), 200))

    def _without_key(self, text: str) -> str:
        return text.replace(self.key, "***") if self.key else text

    def _file(self, messages: list[dict[str, str]]) -> Path:
        request = json.dumps([self.url, self._body(messages)], sort_keys=True)
        return self.cache / f"{hashlib.sha256(request.encode()).hexdigest()}.json"

    def _save(self, messages: list[dict[str, str]], reply: Reply) -> None:
        """Keeps a reply at once, so that a kill loses none; a cache that cannot be written keeps nothing."""
        saved = {"text": reply.text, "prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
        with contextlib.suppress(OSError):
            self.cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomic(self._file(messages), json.dumps(saved))
