"""Which gateway is asked, and with which token."""

from __future__ import annotations

from pathlib import Path

import pytest

import loom
from loom_proxy.contexts import ContextFile, GatewayContext, Origin, choose_gateway

pytestmark = pytest.mark.usefixtures("config")

ARGUMENT, VARIABLE, CONTEXT = "ws://127.0.0.1:1", "ws://127.0.0.1:2", "ws://127.0.0.1:3"


@pytest.fixture
def context(config: Path) -> None:
    ContextFile().add(GatewayContext("prod", CONTEXT, ca="/a/ca.pem", insecure=True), "the context's")


@pytest.fixture
def variables(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOM_URL", VARIABLE)
    monkeypatch.setenv("LOOM_TOKEN", "the variable's")


@pytest.mark.usefixtures("context", "variables")
def test_the_argument_comes_first() -> None:
    chosen = choose_gateway(ARGUMENT, "the argument's")

    assert (chosen.url, chosen.token, chosen.origin) == (ARGUMENT, "the argument's", Origin.ARGUMENT)
    assert str(chosen) == ARGUMENT


@pytest.mark.usefixtures("context", "variables")
def test_the_variable_comes_before_the_context() -> None:
    chosen = choose_gateway()

    assert (chosen.url, chosen.token, chosen.origin) == (VARIABLE, "the variable's", Origin.ENVIRONMENT)
    assert str(chosen) == f"{VARIABLE} (from LOOM_URL)"


@pytest.mark.usefixtures("context")
def test_the_current_context_comes_last() -> None:
    chosen = choose_gateway()

    assert (chosen.url, chosen.token, chosen.origin) == (CONTEXT, "the context's", Origin.CONTEXT)
    assert (chosen.ca, chosen.insecure) == ("/a/ca.pem", True)
    assert str(chosen) == f"{CONTEXT} (from the context prod)"


@pytest.mark.guarantees(
    "strangers",
    "Whoever has taken the port of a `kubectl port-forward` gets no token; that of a context goes to its "
    "address only",
)
@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("url", [ARGUMENT, CONTEXT, "", None])
def test_the_token_of_a_context_goes_to_no_url_that_was_named_otherwise(
    url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if url is None:
        monkeypatch.setenv("LOOM_URL", VARIABLE)
    chosen = choose_gateway(url)

    assert (chosen.token, chosen.ca, chosen.insecure) == (
        ("the context's", "/a/ca.pem", True) if url == "" else (None, None, False)
    )


@pytest.mark.usefixtures("context")
def test_another_token_wins_and_stays_out_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_gateway(token="the argument's").token == "the argument's"
    monkeypatch.setenv("LOOM_TOKEN", "the variable's")
    assert choose_gateway().token == "the variable's"
    assert choose_gateway(token="the argument's").token == "the argument's"
    monkeypatch.delenv("LOOM_TOKEN")
    assert choose_gateway().token == "the context's"


@pytest.mark.usefixtures("context")
def test_another_authority_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOM_CA", "/the/variable's")
    assert choose_gateway().ca == "/the/variable's"
    assert choose_gateway(ca="/the/argument's").ca == "/the/argument's"


def test_without_any_the_error_says_what_to_do() -> None:
    with pytest.raises(loom.InvalidAddress, match=r"url=.*--url.*LOOM_URL.*`loom context add NAME URL`"):
        loom.connect()


@pytest.mark.usefixtures("context")
def test_without_a_current_one_the_error_lists_the_contexts() -> None:
    ContextFile().add(GatewayContext("dev", ARGUMENT), None)
    ContextFile().remove("prod")

    with pytest.raises(loom.InvalidAddress, match=r"`loom context use NAME`; there are: dev"):
        loom.connect()


def test_an_error_says_where_the_address_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    ContextFile().add(GatewayContext("prod", ARGUMENT), None)
    with pytest.raises(
        loom.GatewayUnreachable, match=r"\[gateway: ws://.*from the context prod, which has no token"
    ):
        loom.connect()

    monkeypatch.setenv("LOOM_URL", VARIABLE)
    with pytest.raises(loom.GatewayUnreachable, match="from LOOM_URL"):
        loom.connect()

    with pytest.raises(loom.GatewayUnreachable) as named:
        loom.connect(ARGUMENT)
    assert "[gateway:" not in str(named.value)


@pytest.mark.usefixtures("context")
def test_no_token_is_shown_by_the_choice() -> None:
    assert "the context's" not in repr(choose_gateway())
    assert "the context's" not in repr(ContextFile().read())
