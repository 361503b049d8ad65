"""The file with the gateway's own token, which may be replaced while the gateway runs."""

from __future__ import annotations

import os
from pathlib import Path

from loom.errors import TokenFileError

LONGEST = 4096  # bytes of a token


class OwnTokenFile:
    """A file whose only content is the gateway's own token. It is read again when it changes.

    Args:
        secret: whether the file is refused if other user ids can read it.
    """

    def __init__(self, path: Path, secret: bool = False) -> None:
        self.path = path
        self._secret = secret

    def version(self) -> tuple[int, ...]:
        """Return a value that changes whenever the file does. Raise `TokenFileError` if there is none."""
        try:
            found = self.path.stat()
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error
        return found.st_mtime_ns, found.st_ino, found.st_size

    def read(self) -> str:
        """Return the token. Raise `TokenFileError` if the file has none, or others could put theirs there."""
        try:
            with self.path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read(LONGEST + 1).decode("ascii").strip()
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error
        except UnicodeDecodeError as error:
            raise self._unusable("a token is ASCII") from error
        if mode & 0o022:
            raise self._unusable("others may write to it and let themselves in: chmod 600 it")
        if self._secret and mode & 0o044:
            raise self._unusable(
                "drivers of other user ids could read it: chmod 600 it (a Secret: defaultMode: 0400)"
            )
        if not text or len(text) > LONGEST or not text.isprintable():
            raise self._unusable("its content is no token: one line and nothing else")
        return text

    def _unusable(self, why: str) -> TokenFileError:
        return TokenFileError(f"cannot use the file {self.path} of the gateway's own token: {why}")
