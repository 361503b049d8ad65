"""By which names a gateway on a loopback address answers."""

from __future__ import annotations

import pytest

from loom.errors import Denied
from loom_gateway.access.origins import AllowedHosts


def answers(hosts: AllowedHosts, host: str | None) -> bool:
    try:
        hosts.check([] if host is None else [(b"accept", b"*/*"), (b"Host", host.encode())])
    except Denied:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8470",
        "localhost.",
        "127.0.0.1",
        "127.0.0.1:8470",
        "127.0.0.2:1",
        "[::1]",
        "[::1]:8470",
    ],
)
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_gateway_on_loopback_answers_to_its_own_names(address: str, host: str) -> None:
    assert answers(AllowedHosts(address), host)


@pytest.mark.guarantees("users", "A gateway on loopback answers to no name that a web page could take over")
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8470",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "",
        ":8470",
        "[evil]:1",
    ],
)
def test_a_gateway_on_loopback_answers_to_no_other_name(host: str) -> None:
    assert not answers(AllowedHosts("127.0.0.1"), host)


def test_no_page_can_take_over_an_address_so_forwards_of_other_interfaces_work() -> None:
    assert answers(AllowedHosts("127.0.0.1"), "192.168.1.5:8470")


def test_a_name_that_is_allowed_is_answered_to() -> None:
    hosts = AllowedHosts("127.0.0.1", ["loom.example"])

    assert answers(hosts, "Loom.example:443")
    assert answers(hosts, "localhost:8470")
    assert not answers(hosts, "evil.example")


def test_a_gateway_that_a_network_reaches_answers_to_every_name_unless_some_are_given() -> None:
    assert answers(AllowedHosts("0.0.0.0"), "loom-gateway.training.svc:8470")
    assert answers(AllowedHosts("10.0.0.7"), "evil.example")
    assert not answers(AllowedHosts("0.0.0.0", ["loom.example"]), "evil.example")


def test_behind_a_trusted_proxy_the_names_are_the_proxys() -> None:
    assert answers(AllowedHosts("127.0.0.1", trusts_proxy=True), "loom.example")
    assert not answers(AllowedHosts("127.0.0.1", ["loom.example"], trusts_proxy=True), "evil.example")


def test_what_names_no_host_is_no_browser() -> None:
    assert answers(AllowedHosts("127.0.0.1"), None)
