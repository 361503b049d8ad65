"""A proof is worth nothing but in its own exchange, on its own side, for its own purpose and what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loom.errors import ProtocolMismatch
from loom.mutual_auth import VERSION, Exchange, Purpose, Side, checked_nonce, new_nonce

EXCHANGE = Exchange(Purpose.POD, "a key", f"1-{'a' * 64}", f"1-{'b' * 64}")
PROOF = EXCHANGE.proof(Side.ASKS, "GET", "/pod")


def test_who_knows_the_key_proves_it() -> None:
    assert EXCHANGE.proves(PROOF, Side.ASKS, "GET", "/pod")


@pytest.mark.guarantees(
    "ports",
    "A proof is worth nothing again, on the other side, for another purpose or in another version, and "
    "neither is one that is cut off or too long",
)
@pytest.mark.parametrize(
    "other",
    [
        replace(EXCHANGE, key="another"),
        replace(EXCHANGE, key=""),
        replace(EXCHANGE, purpose=Purpose.PEER),
        replace(EXCHANGE, asking=new_nonce()),
        replace(EXCHANGE, answering=new_nonce()),
        replace(EXCHANGE, asking=EXCHANGE.answering, answering=EXCHANGE.asking),
    ],
)
def test_a_proof_of_another_exchange_is_none(other: Exchange) -> None:
    assert not other.proves(PROOF, Side.ASKS, "GET", "/pod")


@pytest.mark.parametrize(
    "said", [(), ("GET",), ("GET/pod",), ("GET", "/pod", ""), ("GE", "T/pod"), ("/pod", "GET")]
)
def test_a_proof_says_what_it_says_and_no_more(said: tuple[str, ...]) -> None:
    assert not EXCHANGE.proves(PROOF, Side.ASKS, *said)


@pytest.mark.guarantees(
    "ports",
    "A proof is worth nothing again, on the other side, for another purpose or in another version, and "
    "neither is one that is cut off or too long",
)
def test_a_proof_that_is_sent_back_is_none() -> None:
    assert not EXCHANGE.proves(PROOF, Side.ANSWERS, "GET", "/pod")


@pytest.mark.guarantees(
    "ports",
    "A proof is worth nothing again, on the other side, for another purpose or in another version, and "
    "neither is one that is cut off or too long",
)
@pytest.mark.parametrize("shown", ["", PROOF[:-1], PROOF + "0", PROOF * 1000, PROOF.upper(), "é" * 64])
def test_a_truncated_or_an_overlong_proof_is_none(shown: str) -> None:
    assert not EXCHANGE.proves(shown, Side.ASKS, "GET", "/pod")


def test_nonces_differ_and_say_their_version() -> None:
    nonces = {new_nonce() for _ in range(100)}

    assert len(nonces) == 100
    assert all(checked_nonce(nonce) == nonce and nonce.startswith(f"{VERSION}-") for nonce in nonces)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "1-",
        f"1-{'a' * 63}",
        f"1-{'a' * 65}",
        f"1-{'g' * 64}",
        f"1-{'A' * 64}",
        f" 1-{'a' * 64}",
        f"1-{'a' * 64}\n",
    ]
    + ["a" * 64, "a" * 100_000, f"99999-{'a' * 64}"],
)
def test_what_is_no_nonce_is_refused(text: str) -> None:
    with pytest.raises(ProtocolMismatch, match="it is no Loom, or another version of it"):
        checked_nonce(text)


@pytest.mark.guarantees(
    "ports",
    "A proof is worth nothing again, on the other side, for another purpose or in another version, and "
    "neither is one that is cut off or too long",
)
def test_another_version_is_named() -> None:
    with pytest.raises(
        ProtocolMismatch, match="by version 7 of the proof, and this one by version 1: use the same"
    ):
        checked_nonce(f"7-{'a' * 64}")
