"""Browsers that have signed in to the page, and the codes with which they do.

A browser shows a token once and gets a text in its place: who signed in, for which scope and how long, and a MAC.
The text is not stored here, so the page stays signed in when the gateway is replaced. It is good as long as the
token is. It has no hash of the token: who has that can pretend to be the gateway (`loom.mutual_auth.over_http`).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loom.errors import AuthenticationError, LimitReached, TokenRevoked
from loom.process.state_file import write_json
from loom.token_file import SCOPES, Token
from loom_gateway.access.notes import Notes

logger = logging.getLogger(__name__)

LASTS = 7 * 24 * 3600.0
"""Seconds after which a browser has to sign in again."""

CODE_LASTS = 60.0
"""Seconds in which a code has to be used."""

MAX_CODES = 100
"""Codes that one user gets in `CODE_LASTS` seconds."""

PREFIX = "loom-page-"
"""Begins the text that a browser shows. A token that begins so is refused."""


@dataclass(frozen=True)
class SignIn:
    """A browser that has signed in. Times are seconds since the epoch."""

    id: str
    token: str
    """The id of the token that was shown."""
    proof_key: str
    """The token's `loom.mutual_auth.over_http.key_id`, which changes when the gateway's own token is replaced."""
    issuer_key: str
    """The id of the key with which an issuer signed the token; empty for other tokens."""
    user: str
    name: str
    scope: str
    created: float
    expires: float
    in_cookie: bool
    """True if the browser keeps it in a cookie; the page keeps it in its memory otherwise."""


class SignIns:
    """Makes and checks sign-ins. Sign-ins that ended before their time are remembered.

    Args:
        path: a file in the state folder, for the next gateway; None: sign-ins last as long as this one.
        secret: the secret of several gateways, each of which takes the others' sign-ins; by default its own.
        clock: returns the time of day, in seconds since the epoch.
        steady: returns seconds, and never jumps; that clock, if another than the machine's is given.
    """

    def __init__(
        self,
        path: str | None = None,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] | None = None,
        secret: bytes | None = None,
    ) -> None:
        self._path = path
        self._clock = clock
        self._steady = steady or (time.monotonic if clock is time.time else clock)
        self._noted: dict[str, float] = {}  # when each of `_ended` was noted here, by the clock that does not jump
        self._secret = secrets.token_bytes(32)
        self._writing = asyncio.Lock()
        self._ended: dict[str, float] = {}  # ids of sign-ins that have ended, and when each would have expired
        self.codes = Notes(self._steady)
        self._made: list[tuple[float, str]] = []  # of the codes that were made here: when each expires, and whose
        if path is not None:
            self._read(path)
        self._secret = secret or self._secret

    @property
    def ended(self) -> Mapping[str, float]:
        """The ids of the sign-ins that have ended before their time, and when each would have expired."""
        return dict(self._ended)

    async def learn(self, ended: Mapping[str, float]) -> None:
        """Refuse sign-ins that have ended at another gateway. The disk does not hold up the event loop."""
        if new := {id: expires for id, expires in ended.items() if id not in self._ended}:
            await self._note(new)

    def _read(self, path: str) -> None:
        try:
            found = json.loads(Path(path).read_bytes())
            self._secret = bytes.fromhex(found["secret"])
            self._ended = {str(id): float(expires) for id, expires in found["ended"].items()}
        except FileNotFoundError:
            self._write({})
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            logger.error("%s cannot be read, so that browsers have to sign in again: %s", path, error)
            self._write({})

    def _write(self, ended: dict[str, float]) -> None:
        if self._path is not None:
            try:
                write_json(self._path, {"secret": self._secret.hex(), "ended": ended})
            except OSError as error:
                logger.error("who has signed in and out cannot be kept in %s: %s", self._path, error)

    @property
    def cookie(self) -> str:
        """The cookie's name. Browsers send cookies to each port of a host, so each gateway has its own name."""
        return "loom-" + hashlib.sha256(b"loom page " + self._secret).hexdigest()[:12]

    def begin(self, token: Token, proof_key: str, in_cookie: bool, issuer_key: str = "") -> tuple[SignIn, str]:
        """Sign a browser in with a token that is good; return the sign-in, and the text to show."""
        sign_in = self._new(token, proof_key, in_cookie, issuer_key)
        said = _text(json.dumps(asdict(sign_in), separators=(",", ":")).encode())
        return sign_in, f"{PREFIX}{said}.{self._mac(said)}"

    def _new(self, token: Token, proof_key: str, in_cookie: bool, issuer_key: str) -> SignIn:
        now = self._clock()
        expires = min(now + LASTS, now + LASTS if token.expires is None else token.expires)
        return SignIn(
            secrets.token_hex(8),
            token.id,
            proof_key,
            issuer_key,
            token.user,
            token.name,
            token.scope,
            now,
            expires,
            in_cookie,
        )

    def read(self, text: str) -> SignIn:
        """Return the sign-in that a browser shows.

        Raises:
            AuthenticationError: this gateway has made no such text; `TokenRevoked`: it has, and it is over.
        """
        said, _, mac = text.removeprefix(PREFIX).partition(".")
        if not hmac.compare_digest(mac.encode(), self._mac(said).encode()):
            raise AuthenticationError("this gateway does not know the sign-in of this page: sign in again")
        body: Mapping[str, Any] = json.loads(base64.urlsafe_b64decode(said + "=" * (-len(said) % 4)))
        try:
            sign_in = SignIn(**body)
        except TypeError as error:
            raise AuthenticationError("another version of Loom has made the sign-in: sign in again") from error
        self.confirm(sign_in)
        return sign_in

    def confirm(self, sign_in: SignIn, now: float | None = None) -> None:
        """Raise `TokenRevoked` if a sign-in that was good has expired or was ended; ``now``: the time of day."""
        if sign_in.id in self._ended:
            raise TokenRevoked("this page was signed out: sign in again")
        if sign_in.expires <= (self._clock() if now is None else now):
            raise TokenRevoked("the sign-in of this page has expired: sign in again")

    async def end(self, sign_in: SignIn) -> None:
        """Refuse a sign-in from now on, though it has not expired. The disk does not hold up the event loop."""
        now, steady = self._clock(), self._steady()
        for id, expires in list(self._ended.items()):
            # A time of day that has jumped, and goes back, would make what was ended good again.
            if expires <= now and self._noted.setdefault(id, steady) + LASTS <= steady:
                del self._ended[id], self._noted[id]
        await self._note({sign_in.id: sign_in.expires})

    async def _note(self, ended: Mapping[str, float]) -> None:
        self._ended.update(ended)
        self._noted.update(dict.fromkeys(ended, self._steady()))
        async with self._writing:
            await asyncio.to_thread(self._write, dict(self._ended))

    async def new_code(
        self, token: Token, proof_key: str, scope: str | None, in_cookie: bool, issuer_key: str = ""
    ) -> tuple[str, float]:
        """Return a code with which a browser signs in once, and when it expires.

        Args:
            scope: the scope of the sign-in, if it is to be smaller than the token's.
            in_cookie: whether the browser may keep the sign-in in a cookie.

        Raises:
            LimitReached: the user has had `MAX_CODES` codes lately.
        """
        now = self._steady()
        self._made = [made for made in self._made if made[0] > now]
        if sum(user == token.user for _, user in self._made) >= MAX_CODES:
            raise LimitReached(f"{token.user!r} has made {MAX_CODES} codes: wait {CODE_LASTS:g} s")
        self._made.append((now + CODE_LASTS, token.user))
        narrowed = replace(token, scope=min(scope or token.scope, token.scope, key=SCOPES.index))
        text = secrets.token_urlsafe(24)
        text += self._code_mac(text)
        begun = self._new(narrowed, proof_key, in_cookie, issuer_key)
        await self.codes.put("code", _digest(text), asdict(begun), CODE_LASTS)
        return text, self._clock() + CODE_LASTS

    async def use_code(self, text: str) -> SignIn:
        """Return what a code stands for. Its token is still to be looked up.

        Raises:
            AuthenticationError: there is no such code, it was used, or its time is over.
        """
        made = hmac.compare_digest(text[32:].encode(), self._code_mac(text[:32]).encode())
        kept = await self.codes.take("code", _digest(text)) if made else None  # for a guess, nobody else is asked
        if kept is None:
            raise AuthenticationError(
                f"the code is not good: each is for one sign-in within {CODE_LASTS:g} s. Run `loom dashboard` again"
            )
        return SignIn(**kept)

    def _code_mac(self, text: str) -> str:
        return self._mac(f"code {text}")[:16]

    def _mac(self, said: str) -> str:
        return _text(hmac.digest(self._secret, said.encode(), hashlib.sha256))


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()
