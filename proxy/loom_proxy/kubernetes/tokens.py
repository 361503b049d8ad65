"""The tokens of the gateways of this user's jobs, which are kept in files of this user's."""

from __future__ import annotations

import os
from pathlib import Path

from loom.token_file import generate_token, state_folder


def token_for(namespace: str, service: str) -> str:
    """Return the token of a job's gateway, kept in a file of this user's; a new one for a new job."""
    path = _path(namespace, service)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return path.read_text().strip()
    with open(handle, "w", encoding="utf-8") as file:
        token = generate_token()
        file.write(token + "\n")
    return token


def kept_token(namespace: str, service: str) -> str | None:
    """Return the token of a job that this user has deployed from here; None if there is none."""
    try:
        return _path(namespace, service).read_text().strip()
    except FileNotFoundError:
        return None


def _path(namespace: str, service: str) -> Path:
    return state_folder() / "kubernetes" / f"{namespace}.{service}.token"
