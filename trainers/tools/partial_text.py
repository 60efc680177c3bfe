"""Decodes tokens as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class PartialText:
    """Decodes tokens as they come; a character of several tokens comes with the last of them.

    A token's text depends on the one before it (a leading space), so a few tokens are decoded again each time.

    Args:
        decode: the text of token ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._tokens: list[int] = []
        self._begin = 0  # of the tokens that are decoded again
        self._sent = 0  # tokens whose text is out

    def add(self, token: int) -> str:
        """The text that a token adds; empty inside a character."""
        self._tokens.append(token)
        text = self._new_text()
        if not text or text.endswith("�"):
            return ""
        self._begin, self._sent = self._sent, len(self._tokens)
        return text

    def end(self) -> str:
        """The text of tokens that still wait for the end of a character."""
        return self._new_text() if self._sent < len(self._tokens) else ""

    def _new_text(self) -> str:
        before = self._decode(self._tokens[self._begin : self._sent])
        return self._decode(self._tokens[self._begin :])[len(before) :]
