"""`TextPieces`: the text of tokens that come one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loom.rl.generation.batch import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextPieces:
    """Turns tokens into pieces of text. A character of several tokens comes with the last of these."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._told = 0
        """How many tokens have been told."""
        self._context = 0
        """Where the tokens begin that are decoded again, because what follows depends on them."""

    def add(self, tokens: list[int], last: bool = False) -> str:
        """Return the text that these tokens add; if they are the ``last``, also an unfinished character."""
        self._tokens += tokens
        before = self._decode(self._context, self._told)
        after = self._decode(self._context, len(self._tokens))
        if not last and after.endswith(_UNFINISHED):
            return ""
        self._context, self._told = self._told, len(self._tokens)
        return after[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[start:end]) if end > start else ""
