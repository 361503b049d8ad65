"""Backends for the package `keyring`, chosen by ``PYTHON_KEYRING_BACKEND``: stand-ins for a system's keyring."""

from __future__ import annotations

import json
import os
from pathlib import Path

from keyring.backend import KeyringBackend
from keyring.errors import KeyringLocked, PasswordDeleteError

__all__ = ["LockedKeyring", "OpenKeyring", "PlaintextKeyring"]


class OpenKeyring(KeyringBackend):
    """A keyring that works, also from one process to the next: it is a file, ``$TEST_KEYRING``."""

    priority = -1  # type: ignore[assignment]  # used only if it is chosen by name

    def get_password(self, service: str, username: str) -> str | None:
        return self._read().get(f"{service}/{username}")

    def set_password(self, service: str, username: str, password: str) -> None:
        self._write({**self._read(), f"{service}/{username}": password})

    def delete_password(self, service: str, username: str) -> None:
        entries = self._read()
        if entries.pop(f"{service}/{username}", None) is None:
            raise PasswordDeleteError("no such entry")
        self._write(entries)

    @staticmethod
    def _read() -> dict[str, str]:
        path = Path(os.environ["TEST_KEYRING"])
        entries: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        return entries

    @staticmethod
    def _write(entries: dict[str, str]) -> None:
        Path(os.environ["TEST_KEYRING"]).write_text(json.dumps(entries))


class PlaintextKeyring(OpenKeyring):
    """A keyring that protects nothing, as `keyrings.alt` has one of this name."""


class LockedKeyring(KeyringBackend):
    """A keyring that the user has not unlocked."""

    priority = -1  # type: ignore[assignment]  # used only if it is chosen by name

    def get_password(self, service: str, username: str) -> str | None:
        raise KeyringLocked("the collection is locked")

    def set_password(self, service: str, username: str, password: str) -> None:
        raise KeyringLocked("the collection is locked")

    def delete_password(self, service: str, username: str) -> None:
        raise KeyringLocked("the collection is locked")
