"""Pieces of text that come one after the other are the text of all tokens."""

from __future__ import annotations

from collections.abc import Sequence

from loom.rl.generation.http_app import TextPieces


class Bytes:
    """A tokenizer with a token for each byte, so that some characters have several."""

    pad, eos, size = 256, 257, 258

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def test_a_character_of_several_tokens_comes_whole() -> None:
    text = "aé中🧵b"
    pieces = TextPieces(Bytes())
    told = [pieces.add([token]) for token in Bytes().encode(text)]
    assert "".join(told) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(told)


def test_an_unfinished_character_comes_at_the_end() -> None:
    pieces = TextPieces(Bytes())
    assert pieces.add(Bytes().encode("é")[:1]) == ""
    assert pieces.add([], last=True) == "\N{REPLACEMENT CHARACTER}"


def test_tokens_may_come_together() -> None:
    pieces = TextPieces(Bytes())
    assert pieces.add(list(b"ab")) + pieces.add([]) + pieces.add(list(b"c"), last=True) == "abc"
