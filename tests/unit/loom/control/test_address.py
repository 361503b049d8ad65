"""Where a threadlet finds the weaver."""

from __future__ import annotations

import os

import pytest

from loom.control import address as addresses
from loom.control.address import WeaverAddress, hold_address, parse_weaver_address, weaver_address
from loom.errors import InvalidAddress


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://10.0.0.5:8471/a-Key_1", WeaverAddress("10.0.0.5", 8471, "a-Key_1")),
        ("tcp://gateway.loom:1/k", WeaverAddress("gateway.loom", 1, "k")),
        ("tcp://[::1]:65535/k", WeaverAddress("::1", 65535, "k")),
    ],
)
def test_an_address_is_read_and_written(text: str, address: WeaverAddress) -> None:
    assert parse_weaver_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    ["", "tcp://h:1", "tcp://h:1/", "tcp://h:0/k", "tcp://h:65536/k", "tcp://h/k", "http://h:1/k", "tcp://h:1/k k"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidAddress, match="tcp://HOST:PORT/KEY"):
        parse_weaver_address(text)


def test_an_address_that_is_refused_does_not_show_its_key() -> None:
    with pytest.raises(InvalidAddress) as caught:
        parse_weaver_address("tcp://h:99999/secret")

    assert "secret" not in str(caught.value)
    assert "tcp://h:99999/" in str(caught.value)


def test_an_address_that_a_process_was_given_is_in_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_held", "")
    monkeypatch.delenv("LOOM_WEAVER", raising=False)
    assert weaver_address() == ""

    hold_address("tcp://h:1/anna:s:mac")

    assert weaver_address() == "tcp://h:1/anna:s:mac"
    assert "LOOM_WEAVER" not in os.environ
    monkeypatch.setenv("LOOM_WEAVER", "tcp://other:1/k")
    assert weaver_address() == "tcp://other:1/k"
