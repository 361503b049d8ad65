"""The keys by which the weaver tells its callers apart.

A key names a user, perhaps one session of theirs, and has a MAC over both: ``user:session:mac``. A holder of the
weaver's secret can check a key, so that no key need be stored. The gateway and the weaver's process know it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

import msgpack

from loom.errors import AuthenticationError, WrongArguments
from loom.token_file import ADMIN

EVERYONE = "\0everyone"  # in a request of the gateway: all users; no user has an unprintable name

_SECRET_BYTES = 32


class Grant(NamedTuple):
    """The rights of a key's holder."""

    user: str | None
    """None: the gateway, which may act for every user."""
    session: str | None
    """The only session; None: every session of the user."""

    @property
    def is_gateway(self) -> bool:
        return self.user is None


class Keys:
    """The keys that follow from a secret. ``before`` is the key of an older Loom, shared by all threadlets."""

    def __init__(self, secret: bytes, before: str | None = None) -> None:
        self._secret = secret
        self._before = before

    def gateway(self) -> str:
        """Return the key of the gateway."""
        return self._key(None, None)

    def of(self, user: str, session: str | None = None) -> str:
        """Return the key of a user, for all of their sessions or for one."""
        return self._key(user, session)

    def read(self, key: str) -> Grant:
        """Return what a key grants. Raise `AuthenticationError` if no key of this secret has that text."""
        parts = key.split(":")
        if len(parts) == 3:
            user, session = (unquote(part) or None for part in parts[:2])
            if hmac.compare_digest(self._key(user, session).encode(), key.encode()):
                return Grant(user, session)
        elif self._before is not None and hmac.compare_digest(key.encode(), self._before.encode()):
            return Grant(ADMIN, None)
        raise AuthenticationError(
            "the key is not of this weaver, or of an earlier secret of it: ask for the address again"
        )

    def _key(self, user: str | None, session: str | None) -> str:
        mac = hmac.digest(self._secret, msgpack.packb([user, session]), hashlib.sha256)
        text = base64.urlsafe_b64encode(mac).decode().rstrip("=")
        return f"{quote(user or '', safe='')}:{quote(session or '', safe='')}:{text}"


def secret_in(path: Path) -> bytes:
    """Return the secret in a file, without the end of a line of text. Raise `WrongArguments` if it is none."""
    try:
        with path.open("rb") as file:
            mode, secret = os.fstat(file.fileno()).st_mode, file.read()
    except OSError as error:
        raise WrongArguments(f"cannot read the weaver's secret in {path}: {error.strerror or error}") from error
    if mode & 0o026:
        raise WrongArguments(
            f"others can read or change the weaver's secret in {path}: chmod 600 it (a Secret: defaultMode: 0440)"
        )
    secret = secret.rstrip(b"\r\n") if secret.isascii() else secret
    if len(secret) < _SECRET_BYTES:
        raise WrongArguments(
            f"the weaver's secret in {path} has {len(secret)} bytes, and {_SECRET_BYTES} random ones at least are "
            f"needed: openssl rand -hex 32"
        )
    return secret


def read_secret(folder: Path, known: bytes | None = None) -> bytes:
    """Return the secret in the weaver's folder, which gets ``known``, or else a random one, if it has none."""
    path = folder / "secret"
    try:
        return path.read_bytes()
    except FileNotFoundError:
        pass
    fresh = folder / f"secret.{os.getpid()}"
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(known or secrets.token_bytes(_SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(fresh, path)  # if another process was faster, its secret holds
    except FileExistsError:
        pass
    finally:
        fresh.unlink()
    return path.read_bytes()
