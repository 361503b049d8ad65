"""The tokens of this user's jobs, kept so that another program can join them."""

from __future__ import annotations

import os
from pathlib import Path

from loom.token_file import generate_token


def token_for(namespace: str, service: str) -> str:
    """Return the token of a job's gateway; a new one for a new job.

    The token is kept in a file that only this user can read. The pods know only its hash.
    """
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(state) / "loom" / "kubernetes"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{namespace}.{service}.token"
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return path.read_text().strip()
    with open(handle, "w", encoding="utf-8") as file:
        token = generate_token()
        file.write(token + "\n")
    return token
