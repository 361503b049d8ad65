"""Tokens in the system's keyring, by way of the optional package ``keyring``.

A keyring that exists and refuses is an error, and no reason to write the token to a file: the user would not learn
that a secret which belongs in the keyring lies on the disk.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, TypeVar

from loom.errors import KeyringUnavailable

V = TypeVar("V")

SERVICE = "loom"
"""The service of every token in the keyring; the user name of an entry names the context."""

_NO_KEYRINGS = ("keyring.backends.fail", "keyring.backends.null")
"""Modules of the backends that stand for "there is none"."""


def find_keyring() -> Any:
    """Return the backend of `keyring` that this user's tokens are kept in; None if there is none that is safe.

    Raises:
        KeyringUnavailable: the package is installed and cannot choose a backend, as its configuration names a
            missing one.
    """
    if importlib.util.find_spec("keyring") is None:
        return None
    chosen = _ask("choose a backend", _chosen)
    for backend in getattr(chosen, "backends", None) or (chosen,):  # a chain has several
        kind = type(backend)
        if kind.__module__ not in _NO_KEYRINGS and "plaintext" not in kind.__name__.lower():
            return backend
    return None


def store(entry: str, token: str) -> bool:
    """Keep a token under the name of an entry; return False if there is no keyring."""
    backend = find_keyring()
    if backend is None:
        return False
    _ask(f"store the token of {entry!r}", lambda: backend.set_password(SERVICE, entry, token))
    return True


def load(entry: str) -> str:
    """Return the token of an entry.

    Raises:
        KeyringUnavailable: the keyring is locked or away, or has no such entry.
    """
    backend = find_keyring()
    if backend is None:
        raise KeyringUnavailable(
            f"the token of {entry!r} is in a keyring, and there is none here: pip install 'monarch-loom[keyring]', "
            f"or log in where the keyring is; or give --token or LOOM_TOKEN"
        )
    token = _ask(f"return the token of {entry!r}", lambda: backend.get_password(SERVICE, entry))
    if token is None:
        raise KeyringUnavailable(
            f"{_name(backend)} has no token of {entry!r} any more: add the context again with `loom context add`"
        )
    return str(token)


def forget(entry: str) -> None:
    """Delete an entry, if there is a keyring that has it."""
    backend = find_keyring()
    if backend is not None and _ask(f"find {entry!r}", lambda: backend.get_password(SERVICE, entry)) is not None:
        _ask(f"delete {entry!r}", lambda: backend.delete_password(SERVICE, entry))


def _chosen() -> Any:
    import keyring

    return keyring.get_keyring()


def _name(backend: Any) -> str:
    return f"the keyring {getattr(backend, 'name', type(backend).__name__)!r}"


def _ask(what: str, call: Callable[[], V]) -> V:
    """Return what a call to the keyring returns; any error of a backend becomes `KeyringUnavailable`."""
    try:
        return call()
    except Exception as error:
        raise KeyringUnavailable(
            f"the keyring did not {what}: {error or type(error).__name__}. Unlock it and try again. Or keep tokens "
            f"in a file that only you can read: set PYTHON_KEYRING_BACKEND=keyring.backends.null.Keyring, and add "
            f"the context again"
        ) from error
