"""Tokens of contexts in the system's keyring, by the real package `keyring`; its backends are stand-ins."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import keyring
import pytest
from keyring.backends import fail, null
from keyring.backends.chainer import ChainerBackend

import loom
from loom_proxy.contexts import ContextFile, GatewayContext, choose_gateway
from tests.support import keyrings

pytestmark = pytest.mark.usefixtures("config")

PROD = GatewayContext("prod", "ws://127.0.0.1:1")

Choose = Callable[[keyring.backend.KeyringBackend], None]


@pytest.fixture
def choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Makes a backend the one that `keyring` has chosen."""
    monkeypatch.setenv("TEST_KEYRING", str(tmp_path / "keyring"))
    monkeypatch.setattr(keyring.core, "_keyring_backend", None)
    return lambda backend: monkeypatch.setattr(keyring.core, "_keyring_backend", backend)


def stored(tmp_path: Path) -> list[str]:
    """The tokens in the keyring."""
    path = tmp_path / "keyring"
    return list(json.loads(path.read_text()).values()) if path.exists() else []


def test_the_token_is_in_the_keyring_and_not_in_the_file(choose: Choose, tmp_path: Path) -> None:
    choose(keyrings.OpenKeyring())

    assert ContextFile().add(PROD, "secret")

    assert stored(tmp_path) == ["secret"]
    assert "secret" not in ContextFile().path.read_text()
    assert choose_gateway().token == "secret"


def test_the_keyring_keeps_no_token_of_a_context_that_was_replaced_or_removed(
    choose: Choose, tmp_path: Path
) -> None:
    choose(keyrings.OpenKeyring())
    file = ContextFile()
    file.add(PROD, "first")

    file.add(PROD, "second")
    assert stored(tmp_path) == ["second"]
    file.remove("prod")
    assert stored(tmp_path) == []


def test_a_context_that_cannot_be_written_leaves_no_token_behind(choose: Choose, tmp_path: Path) -> None:
    choose(keyrings.OpenKeyring())
    ContextFile().path.parent.mkdir(parents=True)
    ContextFile().path.write_text("damaged")

    with pytest.raises(loom.ContextFileError):
        ContextFile().add(PROD, "secret")

    assert stored(tmp_path) == []


@pytest.mark.guarantees(
    "strangers",
    "Whoever has taken the port of a `kubectl port-forward` gets no token; that of a context goes to its "
    "address only",
)
def test_a_token_in_the_keyring_is_found_only_for_its_url(choose: Choose) -> None:
    choose(keyrings.OpenKeyring())
    ContextFile().add(PROD, "secret")
    path = ContextFile().path
    path.write_text(path.read_text().replace("ws://127.0.0.1:1", "ws://127.0.0.1:2"))

    with pytest.raises(loom.KeyringUnavailable, match="add the context again"):
        choose_gateway()


@pytest.mark.parametrize(
    "backend",
    [fail.Keyring, null.Keyring, keyrings.PlaintextKeyring],
    ids=["fail", "null", "plaintext"],
)
def test_a_backend_that_protects_nothing_is_not_used(
    backend: type[keyring.backend.KeyringBackend], choose: Choose, tmp_path: Path
) -> None:
    choose(backend())

    assert not ContextFile().add(PROD, "secret")

    assert stored(tmp_path) == []
    assert choose_gateway().token == "secret"


def test_of_a_chain_the_first_backend_that_protects_is_used(
    choose: Choose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chained = [keyrings.PlaintextKeyring(), keyrings.OpenKeyring()]
    monkeypatch.setattr(ChainerBackend, "backends", chained)
    choose(ChainerBackend())
    assert ContextFile().add(PROD, "secret")

    monkeypatch.setattr(ChainerBackend, "backends", chained[:1])
    assert not ContextFile().add(PROD, "secret")


def test_a_locked_keyring_is_an_error_and_the_token_does_not_go_to_the_file(choose: Choose) -> None:
    choose(keyrings.LockedKeyring())

    with pytest.raises(loom.KeyringUnavailable, match=r"is locked\. Unlock it.*null\.Keyring"):
        ContextFile().add(PROD, "secret")

    assert not ContextFile().path.exists()


def test_a_keyring_that_is_locked_later_is_an_error_unless_there_is_another_token(choose: Choose) -> None:
    choose(keyrings.OpenKeyring())
    ContextFile().add(PROD, "secret")
    choose(keyrings.LockedKeyring())

    with pytest.raises(loom.KeyringUnavailable, match="is locked"):
        choose_gateway()
    assert choose_gateway(token="another").token == "another"


def test_a_context_can_be_removed_while_the_keyring_is_locked(
    choose: Choose, caplog: pytest.LogCaptureFixture
) -> None:
    choose(keyrings.OpenKeyring())
    ContextFile().add(PROD, "secret")
    choose(keyrings.LockedKeyring())

    with caplog.at_level(logging.WARNING):
        ContextFile().remove("prod")

    assert "a token is left in the keyring" in caplog.text
    assert not ContextFile().read().by_name


def test_without_the_package_the_token_is_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    assert not ContextFile().add(PROD, "secret")

    assert choose_gateway().token == "secret"


def test_a_token_in_a_keyring_that_is_gone_is_an_error(choose: Choose) -> None:
    choose(keyrings.OpenKeyring())
    ContextFile().add(PROD, "secret")
    choose(fail.Keyring())

    with pytest.raises(loom.KeyringUnavailable, match=r"monarch-loom\[keyring\]"):
        choose_gateway()
