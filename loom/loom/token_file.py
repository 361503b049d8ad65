"""The file with a gateway's tokens, which ``loom token`` writes and a gateway reads.

The file holds only the SHA-256 of each token. That is enough, without salt or a slow hash, because a token is 256
random bits: it is on no list of likely ones, and trying all of them is impossible.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from loom.errors import TokenFileError, UnknownToken, WrongArguments
from loom.process.state_file import locked, replace_file

SCOPES = ("view", "operate", "drive", "admin")  # the scopes of tokens; each includes the ones before it

REPORT = "report"
"""The scope of a token of one replica, which reports the replica's status, and reads nothing."""

ADMIN = "admin"
"""The user of a gateway's own token, and the scope that reaches what is other users'."""

OPENID_PREFIX = "oidc:"
"""Begins the names of users whose tokens an OpenID issuer signs. No token of the file has such a name."""

MAX_NAME = 100
"""Characters of the name of a user, or of a token."""

_VERSION = 1
_LONGEST_REPLICA = 200  # characters

_ALPHABETS = ("LATIN", "CYRILLIC", "GREEK", "ARMENIAN", "CHEROKEE")
"""Alphabets with letters that look the same."""


def generate_token() -> str:
    """Return a new token, with 256 bits of randomness."""
    return secrets.token_urlsafe(32)


def digest(token: str) -> str:
    """Return the hash of a token that the file holds."""
    return hashlib.sha256(token.encode()).hexdigest()


def default_path() -> Path:
    """Return the path in ``LOOM_TOKENS``, or that of the user's own file."""
    if given := os.environ.get("LOOM_TOKENS"):
        return Path(given)
    return state_folder() / "tokens.json"


def state_folder() -> Path:
    """Return the folder in which Loom keeps files of this user's between programs."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "loom"


@dataclass(frozen=True)
class Token:
    """The record of a token, without the token itself. Times are seconds since the epoch."""

    id: str
    name: str
    scope: str
    sha256: str
    created: float
    expires: float | None = None
    revoked: float | None = None
    user: str = ""
    """The user whom it belongs to; by default, as in a file of an older Loom, the one with its name."""
    replica: str | None = None
    """The one replica of a token of scope `REPORT`."""

    def __post_init__(self) -> None:
        if not self.user:
            object.__setattr__(self, "user", self.name)

    def state(self, now: float) -> str:
        """Return ``valid``, ``revoked`` or ``expired``."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "valid"


_OWN = Token("gateway", "gateway", ADMIN, "", 0.0, user=ADMIN)
"""The record of a gateway's own token, as far as others may not look like it."""


class TokenFile:
    """The tokens in a file. A file that does not exist has none; the first token makes it and its folder.

    Several programs may change the file at once: each holds a lock meanwhile, and replaces the file as a whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def version(self) -> tuple[int, ...]:
        """Return a value that changes whenever the file does."""
        try:
            stat = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):  # the latter with a HOME that is none, as /dev/null
            return ()
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error
        return stat.st_mtime_ns, stat.st_ino, stat.st_size

    def read(self) -> list[Token]:
        """Return all tokens, the oldest first; raise `TokenFileError` if others may write to the file, too."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_mode & 0o022:
                    raise self._unusable("others may write to it and let themselves in: chmod 600 it")
                content = json.load(file)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error
        except ValueError as error:
            raise self._unusable(f"it is not JSON: {error}") from error
        try:
            if content["version"] != _VERSION:
                raise self._unusable(f"it is of version {content['version']!r}; this Loom knows {_VERSION}")
            return [_token(entry) for entry in content["tokens"]]
        except (KeyError, TypeError, ValueError) as error:
            raise self._unusable(f"it is not a file of tokens: {error!r}") from error

    def create(
        self,
        name: str,
        scope: str,
        expires_in: float | None = None,
        user: str | None = None,
        replica: str | None = None,
    ) -> tuple[Token, str]:
        """Make a token of a user, by default the one with its name; return its record and the token itself.

        It expires in ``expires_in`` seconds, or never. One of scope `REPORT` is for one ``replica``, and no other.

        Raises:
            WrongArguments: the scope or the time makes no sense, or the user or the name looks like another's.
        """
        user = name if user is None else user
        if replica is not None:
            _check_replica(replica)
        if scope not in SCOPES and (scope != REPORT or replica is None):
            raise WrongArguments(f"there is no scope {scope!r}; choose one of {', '.join(SCOPES)}")
        _check_name("user", user)
        _check_name("name", name)
        if expires_in is not None and not 0 < expires_in < float("inf"):
            raise WrongArguments(f"a token cannot expire in {expires_in:g} s")
        now = time.time()
        text = generate_token()
        expires = None if expires_in is None else now + expires_in
        token = Token(secrets.token_hex(4), name, scope, digest(text), now, expires, user=user, replica=replica)
        with self._changing() as tokens:
            for other in (_OWN, *tokens):
                _check_distinct(token, other)
            tokens.append(token)
        return token, text

    def accept(self, name: str, scope: str, sha256: str) -> None:
        """Add a token that was made elsewhere, of which `digest` is known, in place of any other of that name.

        The same token keeps its id, and so the sessions that it opened, when it gets another scope. Every
        file gives it the same id.
        """
        with self._changing() as tokens:
            same = next((token for token in tokens if (token.name, token.sha256) == (name, sha256)), None)
            if same is None:
                tokens[:] = [token for token in tokens if token.name != name]
                tokens.append(Token(sha256[:8], name, scope, sha256, time.time()))
            else:
                tokens[tokens.index(same)] = replace(same, scope=scope)

    def revoke(self, ident: str) -> Token:
        """Revoke a token and return its record; do nothing if it was revoked before."""
        found = self._revoke(lambda token: token.id == ident)
        if not found:
            raise UnknownToken(f"{self.path} has no token with the id {ident!r}; `loom token list` shows them")
        return found[0]

    def revoke_user(self, user: str) -> list[Token]:
        """Revoke every token of a user, and return their records."""
        found = self._revoke(lambda token: token.user == user)
        if not found:
            raise UnknownToken(f"{self.path} has no token of a user {user!r}; `loom token list` shows them")
        return found

    def _revoke(self, wanted: Callable[[Token], bool]) -> list[Token]:
        with self._changing() as tokens:
            now = time.time()
            for place, token in enumerate(tokens):
                if wanted(token) and token.revoked is None:
                    tokens[place] = replace(token, revoked=now)
            return [token for token in tokens if wanted(token)]

    @contextlib.contextmanager
    def _changing(self) -> Iterator[list[Token]]:
        """Lock the file and yield its tokens, which are written back unless the body raises."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(locked(self.path))
            except OSError as error:
                raise self._unusable(error.strerror or str(error)) from error
            tokens = self.read()
            yield tokens
            try:
                self._write(tokens)
            except OSError as error:
                raise self._unusable(error.strerror or str(error)) from error

    def _write(self, tokens: list[Token]) -> None:
        text = json.dumps({"version": _VERSION, "tokens": [asdict(token) for token in tokens]}, indent=1)
        replace_file(self.path, text + "\n")

    def _unusable(self, why: str) -> TokenFileError:
        return TokenFileError(f"cannot use the token file {self.path}: {why}")


def _check_distinct(token: Token, other: Token) -> None:
    """Raise `WrongArguments` if a reader could take a new token for another user's."""
    if token.user == other.user:
        return
    user, name = _folded(token.user), _folded(token.name)
    if _folded(other.user) in (user, name):
        raise WrongArguments(f"there is a user {other.user!r} already, and that is not {token.user!r}")
    if _folded(other.name) == user:
        raise WrongArguments(
            f"the user {other.user!r} has a token named {other.name!r}: revoke it, or take another name"
        )


def _token(entry: dict[str, object]) -> Token:
    entry = {"user": entry["name"], "replica": None, **entry}  # a file of an older Loom has neither
    token = Token(**{field.name: entry[field.name] for field in fields(Token)})  # type: ignore[arg-type]
    texts = (token.id, token.name, token.scope, token.sha256, token.user)
    times = (token.created, token.expires, token.revoked)
    scopes = SCOPES if token.replica is None else (REPORT,)
    if not all(isinstance(text, str) for text in texts) or token.scope not in scopes:
        raise ValueError(f"the token {token.id!r:.40} has a strange text or scope")
    if not all(moment is None or isinstance(moment, (int, float)) for moment in times):
        raise ValueError(f"the token {token.id!r:.40} has a strange time")
    return token


def _check_replica(replica: str) -> None:
    if not replica or not replica.isprintable() or len(replica) > _LONGEST_REPLICA:
        raise WrongArguments(f"a replica's name has 1 to {_LONGEST_REPLICA} printable characters")


def _check_name(what: str, name: str) -> None:
    """Raise `WrongArguments` if a token's user or name, which ``what`` says, looks like another, or like none."""
    if not name or not name.isprintable() or len(name) > MAX_NAME:
        raise WrongArguments(f"a token's {what} has 1 to {MAX_NAME} printable characters")
    plain = unicodedata.normalize("NFKC", name).strip()
    if name != plain:
        raise WrongArguments(
            f"{name!a} looks like {plain!r} and is another {what}: write it without blanks at its ends and "
            f"without special forms of letters"
        )
    if len(_alphabets(name)) > 1:
        raise WrongArguments(
            f"the {what} {name!a} has letters of several alphabets ({', '.join(sorted(_alphabets(name)))}), "
            f"which look the same"
        )
    if name == "*":
        raise WrongArguments(f"'*' is no {what}: it means everyone")
    if _folded(name).startswith(OPENID_PREFIX):
        raise WrongArguments(f"names that begin with {OPENID_PREFIX} are those of users of OpenID Connect")


def _folded(name: str) -> str:
    """Return what names have in common that differ in capitals only."""
    return unicodedata.normalize("NFKC", name).casefold()


def _alphabets(name: str) -> set[str]:
    words = {unicodedata.name(letter, "").partition(" ")[0] for letter in name if letter.isalpha()}
    return words.intersection(_ALPHABETS)
