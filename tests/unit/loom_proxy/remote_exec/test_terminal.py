"""``~.`` at the beginning of a line leaves a terminal."""

from __future__ import annotations

import pytest

from loom_proxy.remote_exec.terminal import Escape


@pytest.mark.parametrize(
    ("typed", "sent", "left"),
    [
        (b"ls ~.\r", b"ls ~.\r", False),
        (b"~.", b"", True),
        (b"ls\r~.more", b"ls\r", True),
        (b"~~.\r", b"~.\r", False),
        (b"~a", b"~a", False),
        (b"\n~/x\n", b"\n~/x\n", False),
    ],
)
def test_what_is_typed_is_sent_but_for_the_escape(typed: bytes, sent: bytes, left: bool) -> None:
    at_once, by_key = Escape(), Escape()

    assert at_once.typed(typed) == sent
    assert b"".join(by_key.typed(typed[i : i + 1]) for i in range(len(typed)) if not by_key.left) == sent
    assert (at_once.left, by_key.left) == (left, left)
