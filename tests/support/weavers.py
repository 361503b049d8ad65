"""The weaver of a gateway, which comes a moment after its gateway, and another one after each that dies."""

from __future__ import annotations

from collections.abc import Callable

from loom.errors import GatewayUnreachable, WeaverUnavailable
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import await_true


def await_weaver(weaver: WeaverProxy) -> str:
    """Wait until the weaver is up; return the address at which threadlets find it."""
    return _await(weaver.address)


def await_another(weaver: WeaverProxy, before: str) -> None:
    """Wait until another weaver is up than the one whose status said ``before``."""
    _await(lambda: name if (name := weaver.status()["weaver"]) != before else "")


def _await(question: Callable[[], str]) -> str:
    """Wait until the weaver gives an answer that is not empty."""
    answer = ""

    def is_there() -> bool:
        nonlocal answer
        try:
            answer = question()
        except (WeaverUnavailable, GatewayUnreachable):  # a busy machine's gateway
            return False
        return answer != ""

    await_true(is_there)
    return answer
