"""Tokens and their scopes: the gateway's own token, and those of its token file.

A revoked token stays revoked when the file is gone, damaged or an old copy.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Protocol

from loom.errors import AuthenticationError, IssuerUnreachable, TokenFileError, TokenRevoked
from loom.mutual_auth.over_http import gateway_proof, key_id
from loom.process.state_file import write_json
from loom.process.threads import DaemonExecutor
from loom.token_file import ADMIN, OPENID_PREFIX, SCOPES, Token, TokenFile, digest
from loom_gateway.access.sign_ins import SignIn


class TokenMemory:
    """The memory, in a file of the state folder. Without a path it lasts as long as the gateway."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._writing = Lock()
        self.written: Future[None] = Future()
        """Done when the disk has the newest revocations."""
        self.written.set_result(None)
        self.any = False  # whether the token file has ever had a token
        self.revoked: set[str] = set()  # ids of tokens that were revoked
        if path is None:
            return
        try:
            found = json.loads(Path(path).read_bytes())
            self.revoked = {str(ident) for ident in found["revoked"]}
            self.any = True
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.error("%s cannot be read, so that older revocations are forgotten: %s", path, error)

    def note(self, tokens: Iterable[Token]) -> None:
        """Remember the revocations in a file that was read."""
        listed = list(tokens)
        revoked = self.revoked | {token.id for token in listed if token.revoked is not None}
        if not listed or (self.any and revoked == self.revoked):
            return
        self.any, self.revoked = True, revoked
        if self._path is not None:  # beside the event loop that relays, since the disk may be slow
            self.written = DaemonExecutor("known tokens").submit(self._write, self._path)

    def _write(self, path: str) -> None:
        with self._writing:
            try:
                write_json(path, {"revoked": sorted(self.revoked)})
            except OSError as error:
                logger.error("what was revoked cannot be remembered in %s: %s", path, error)


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


logger = logging.getLogger(__name__)


JUMP_PATIENCE = 600.0
"""Seconds in which a gateway ends no session for a token that had expired when its record was first read."""

OWN = "gateway"
"""The id and name of the gateway's own token, which is not in the file, does not expire, and may do everything."""


@dataclass(frozen=True)
class SignedToken(Token):
    """The record of a token that an issuer signed."""

    key: str = ""
    """The thumbprint of the issuer's key."""


class KeyWanted(IssuerUnreachable):
    """A token is signed by a key that is unknown and can be fetched: wait for ``fetch``, and check again."""

    def __init__(self, message: str, fetch: Callable[[], Awaitable[None]]) -> None:
        super().__init__(message)
        self.fetch = fetch


class Issuer(Protocol):
    """Another party whose signed tokens are accepted."""

    def check(self, text: str) -> Token:
        """Return the record of a token. Raise as `TokenAuthority.check`."""

    def confirm(self, token: Token, now: float | None = None) -> None:
        """Raise `TokenRevoked` if a token that was accepted is not valid any more; ``now``: the time of day."""

    def refresh(self) -> None:
        """Begin to renew what is known of the issuer, if it is old."""


def steady_clock() -> float:
    """Return seconds that no change of the time of day moves; on Linux they go on while the machine is asleep."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class SteadyDay:
    """The time of day as it goes on from now: a later jump of the machine's does not move it."""

    def __init__(self) -> None:
        self._start = time.time() - steady_clock()

    def now(self) -> float:
        """Return seconds since the epoch."""
        return self._start + steady_clock()


class _Ends:
    """When tokens expire, by the time of day and by a clock that does not jump.

    A step by NTP, or a machine that goes on after it was stopped, moves the time of day, perhaps for a moment. A
    client comes back when its token is good again; a session that has ended does not.
    """

    def __init__(self, wall: Callable[[], float], clock: Callable[[], float]) -> None:
        self._wall = wall
        self._clock = clock
        self._ends: dict[str, tuple[float, float]] = {}  # by id, the end by the time of day and by the other clock
        self._doubted: set[str] = set()  # so that a jump is logged once

    def note(self, tokens: Iterable[Token]) -> None:
        """Note the tokens of a file, when it is read."""
        self._ends = {
            token.id: (token.expires, self._end_of(token.id, token.expires))
            for token in tokens
            if token.expires is not None
        }

    def _end_of(self, ident: str, expires: float) -> float:
        """Return the end by the other clock, of a token whose end the file may have moved."""
        if ident in self._ends:
            before, end = self._ends[ident]
            return end + expires - before
        left = expires - self._wall()
        return self._clock() + (left if left > 0 else JUMP_PATIENCE)

    def are_doubtful(self, token: Token) -> bool:
        """Return whether a token that has expired by the time of day may not have."""
        doubtful = token.id in self._ends and self._clock() < self._ends[token.id][1]
        if doubtful and token.id not in self._doubted:
            self._doubted.add(token.id)
            logger.warning(
                "the token %s has expired by the time of day, but not by the machine's other clock: the time of "
                "day has jumped. Its clients are disconnected, and its sessions go on",
                token.id,
            )
        return doubtful


class TokenAuthority:
    """Checks the gateway's own token, those of a file, and those of an issuer. Keeps only their hashes.

    The gateway's own token is a text, or the content of a file. When the file has another, the old one is refused.

    Args:
        wall: returns the time of day, in seconds since the epoch.
        clock: returns seconds, and never jumps.
    """

    def __init__(
        self,
        token: str | OwnTokenFile,
        file: TokenFile | None = None,
        issuer: Issuer | None = None,
        known: TokenMemory | None = None,
        wall: Callable[[], float] = lambda: time.time(),
        clock: Callable[[], float] = steady_clock,
    ) -> None:
        self._wall = wall
        self._ends = _Ends(wall, clock)
        self._own_file = None if isinstance(token, str) else token
        self._own_version = None if self._own_file is None else self._own_file.version()
        self._own = _own_token(token if isinstance(token, str) else token.read())
        self._file = file
        self._issuer = issuer
        self._known = known or TokenMemory()
        self._version: tuple[int, ...] | None = None  # of the file's last content
        self._failed: tuple[tuple[int, ...], TokenFileError] | None = None  # version that cannot be read, and why
        self._by_digest: dict[str, Token] = {}
        self._by_id: dict[str, Token] = {}
        self._by_key: dict[str, str] = {}  # digests by `key_id`
        self._trouble: TokenFileError | None = None  # so that an error is logged once
        self._learned: set[str] = set()  # ids of tokens that were revoked at another gateway

    def refresh(self) -> None:
        """Read the file again if it has changed, and ask the issuer for its keys if they are old."""
        self.reload()
        if self._issuer is not None:
            self._issuer.refresh()

    def reload(self) -> None:
        """Read the files again if they have changed. While one cannot be read, its last content stays in force.

        A token file that was removed lets nobody in.
        """
        try:
            self._reload_own()
            tokens = self._changed_tokens()
        except TokenFileError as error:
            if str(error) != str(self._trouble):
                logger.error("%s%s", error, "; going by what it said before" if self._by_id else "")
            self._trouble = error
            return
        self._trouble = None
        if tokens is None:
            return
        for token in tokens:
            if forged := _openid_name(token):
                logger.error("the token %s has the name of a user of OpenID, %r: it is refused", token.id, forged)
        self._install([token for token in tokens if not _openid_name(token)])

    @property
    def revoked(self) -> Iterable[str]:
        """The ids of the tokens that the file says, or has said, are revoked."""
        return self._known.revoked

    def learn_revoked(self, idents: Iterable[str]) -> None:
        """Refuse tokens that another gateway knows to be revoked, whatever the file says."""
        self._learned.update(idents)
        self._install(self._by_id.values())

    def _install(self, found: Iterable[Token]) -> None:
        tokens = [self._with_revocation(token) for token in found]
        self._by_digest = {token.sha256: token for token in tokens}
        self._by_id = {token.id: token for token in tokens}
        self._by_key = {key_id(token.sha256): token.sha256 for token in tokens}
        self._ends.note(tokens)

    def _reload_own(self) -> None:
        if self._own_file is None or (version := self._own_file.version()) == self._own_version:
            return
        self._own = _own_token(self._own_file.read())
        self._own_version = version
        logger.warning("the gateway's own token was replaced: the old one is refused")

    def _changed_tokens(self) -> list[Token] | None:
        if self._file is None:
            return None
        version = self._file.version()
        if self._failed is not None and self._failed[0] == version:
            raise self._failed[1]
        if version != self._version:
            try:
                if not version and self._known.any:
                    self._by_digest, self._by_id, self._by_key = {}, {}, {}
                    raise TokenFileError(f"the token file {self._file.path} is gone: its tokens let nobody in")
                tokens = self._file.read()
            except TokenFileError as error:
                self._failed = version, error
                raise
        self._failed = None
        if version == self._version:
            return None
        self._version = version
        self._known.note(tokens)
        return tokens

    def _with_revocation(self, token: Token) -> Token:
        if token.revoked is not None or not (token.id in self._known.revoked or token.id in self._learned):
            return token
        logger.error("the token %s was revoked, though its file, an old copy, says otherwise", token.id)
        return replace(token, revoked=time.time())

    def needs_signature(self, shown: str, text: str) -> bool:
        """Return whether only the signature of an issuer can tell whether a token is good."""
        if self._issuer is None or not _may_be_signed(text) or hmac.compare_digest(shown, self._own.sha256):
            return False
        self.reload()
        return shown not in self._by_digest

    def may_know(self, shown: str, text: str) -> bool:
        """Return whether the token with a digest is one of the file, or may be one of the issuer."""
        self.reload()
        signed = self._issuer is not None and _may_be_signed(text)
        return signed or shown in self._by_digest or hmac.compare_digest(shown, self._own.sha256)

    def prove(self, key: str, challenge: str) -> dict[str, str]:
        """Return the `gateway_proof` with a token, for a client that asks before it shows the token.

        Raises:
            AuthenticationError: no token has this `loom.mutual_auth.over_http.key_id`.
            TokenRevoked: it has, and is not good any more.
        """
        self.reload()
        shown = self._own.sha256 if hmac.compare_digest(key_id(self._own.sha256), key) else self._by_key.get(key)
        if shown is not None:
            return gateway_proof(self.check(shown).sha256, challenge)
        raise AuthenticationError("this gateway does not accept the token; ask for one who runs the gateway")

    def check(self, shown: str, text: str = "") -> Token:
        """Return the record of the token with a digest, or of one that the issuer signed, given its text.

        Raises:
            AuthenticationError: the token is unknown; `TokenRevoked` if it was revoked or has expired.
            ScopeError: the issuer's token gives no scope.
            KeyWanted: the issuer's key is unknown, and can be fetched; `IssuerUnreachable` if it cannot.
        """
        self.reload()
        if hmac.compare_digest(shown, self._own.sha256):
            return self._own
        # The time of the look-up may depend on the digest, but reveals nothing about a token.
        token = self._by_digest.get(shown)
        if token is None and self._issuer is not None and _may_be_signed(text):
            return self._issuer.check(text)
        if token is None and self._failed is not None:
            raise AuthenticationError(
                f"this gateway does not know the token, and cannot look: {self._failed[1]}. Until it can, it "
                f"refuses tokens of `loom token` that it has not seen"
            )
        if token is None:
            raise AuthenticationError(
                "this gateway does not accept the token; ask for one who runs the gateway"
                + ("" if self._file is None else ": `loom token create` makes it")
            )
        self.confirm(token.id)
        return token

    def token_of(self, sign_in: SignIn) -> Token:
        """Return the record of the token with which a page signed in, in the scope of the sign-in.

        Raises:
            TokenRevoked: the token is not good any more.
            AuthenticationError: the token file, which had it, cannot be read.
        """
        self.reload()
        if sign_in.token == OWN:
            if key_id(self._own.sha256) != sign_in.proof_key:
                raise TokenRevoked("the gateway's own token was replaced: sign in with the new one")
            token = self._own
        elif sign_in.token.startswith(OPENID_PREFIX):
            token = SignedToken(
                sign_in.token,
                sign_in.name,
                sign_in.scope,
                "",
                sign_in.created,
                sign_in.expires,
                user=sign_in.user,
                key=sign_in.issuer_key,
            )
        elif sign_in.token in self._by_id or self._failed is None:
            self.confirm(sign_in.token)
            token = self._by_id[sign_in.token]
        else:
            raise AuthenticationError(f"this gateway cannot look whether the sign-in is good: {self._failed[1]}")
        self.confirm_shown(token)
        return replace(token, scope=min(token.scope, sign_in.scope, key=SCOPES.index))

    def user_of(self, ident: str) -> str:
        """Return the user of a token that was accepted, given its id; the gateway's own for an unknown one."""
        self.reload()
        if ident.startswith(OPENID_PREFIX):
            return ident
        return self._by_id[ident].user if ident in self._by_id else ADMIN

    def confirm_shown(self, token: Token, now: float | None = None) -> None:
        """Raise `TokenRevoked` if a token that was accepted is not valid any more; ``now``: the time of day."""
        if token.id == OWN and token.sha256 != self._own.sha256:
            raise TokenRevoked("the gateway's own token was replaced: connect with the new one")
        self.confirm(token.id, now)
        if self._issuer is not None:
            self._issuer.confirm(token, now)

    def confirm_any(self, idents: Sequence[str]) -> None:
        """Raise `TokenRevoked`, about the last one, unless a token with one of these ids is still good.

        An expired one counts as good while only the time of day says so, which may have jumped.
        """
        for ident in idents:
            try:
                return self.confirm(ident)
            except TokenRevoked as error:
                token = self._by_id.get(ident)
                if token is not None and token.revoked is None and self._ends.are_doubtful(token):
                    return
                revoked = error
        raise revoked

    def confirm(self, ident: str, now: float | None = None) -> None:
        """Raise `TokenRevoked` if the token with an id, which was accepted, was revoked or has expired.

        The id of an issuer's user, who has another token every hour, is good as long as the gateway has an issuer.
        """
        if ident in ("", OWN):  # an empty id is that of a gateway that recorded no owners
            return
        if ident.startswith(OPENID_PREFIX):
            if self._issuer is None:
                raise TokenRevoked(f"this gateway accepts no OpenID tokens any more, as {ident!r} had")
            return
        token = self._by_id.get(ident)
        never_read = self._failed is not None and self._version is None
        if token is None and never_read and ident not in self._known.revoked:
            return  # it may be in the file that cannot be read, and a session is not ended on a guess
        state = "revoked" if token is None else token.state(self._wall() if now is None else now)
        if state != "valid":
            name = "" if token is None else f" ({token.name!r})"
            how = "has expired" if state == "expired" else "was revoked"
            raise TokenRevoked(f"the token {ident}{name} {how}: ask for a new one and connect with it")


def _own_token(text: str) -> Token:
    return Token(OWN, OWN, ADMIN, digest(text), time.time(), user=ADMIN)


def _may_be_signed(text: str) -> bool:
    return text.count(".") == 2


def _openid_name(token: Token) -> str | None:
    """Return the name or the user of a token of the file if it is one that only an issuer gives."""
    return next((name for name in (token.user, token.name) if name.startswith(OPENID_PREFIX)), None)
