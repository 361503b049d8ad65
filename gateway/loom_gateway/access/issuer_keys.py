"""The public keys of an OpenID Connect issuer: fetched, kept, and fetched again when the issuer changes them.

joserfc reads and checks the keys. It fetches none. PyJWT's client follows redirects, reads documents of any size
and asks the issuer again for each unknown key. So fetching, with its bounds, is here.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from joserfc.errors import JoseError
from joserfc.jwk import ECKey, JWKRegistry, OKPKey, RSAKey

from loom.errors import LoomError, WrongArguments
from loom.process.listen import is_loopback
from loom.process.threads import DaemonExecutor

logger = logging.getLogger(__name__)

Key = RSAKey | ECKey | OKPKey

REFRESH = 600.0
"""Seconds after which the keys are fetched again, so that a key that the issuer took back stops working."""

RETRY = 10.0
"""Seconds between two fetches at least. Tokens that name unknown keys cannot make the gateway ask more often."""

FETCH_TIMEOUT = 10.0  # seconds that one document may take
MAX_DOCUMENT = 1 << 20  # bytes of one document at most
MAX_KEYS = 200  # keys of an issuer at most; further ones are ignored
MIN_RSA = 2048  # bits of an RSA key at least (RFC 7518, section 3.3)

_CURVES = {"ES256": "P-256", "ES384": "P-384", "ES512": "P-521", "EdDSA": "Ed25519", "Ed25519": "Ed25519"}

ALGORITHMS = frozenset({f"{kind}{bits}" for kind in ("RS", "PS") for bits in (256, 384, 512)} | set(_CURVES))
"""The signatures that are accepted. All are asymmetric: who can check a token cannot make one."""


class IssuerKeys:
    """The keys of one issuer. Fetching never blocks the event loop, and is done once for all who wait.

    Args:
        issuer: the issuer's URL, as its tokens name it.
        ca: PEM file of the authority that vouches for it; None: those of this machine.
        clock: returns the time in seconds.

    Raises:
        WrongArguments: the URL is no ``https`` URL, or the file has no certificate.
    """

    def __init__(self, issuer: str, ca: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._issuer = issuer
        self._opener = _opener(issuer, ca)
        self._clock = clock
        self._keys: dict[str, list[Key]] = {}  # by key id; keys without one are under their thumbprint
        self._thumbprints: frozenset[str] = frozenset()
        self._tried: float | None = None
        self._fetched: float | None = None
        self._fetching: asyncio.Future[None] | None = None
        self._asked: set[str | None] = set()  # the ids of keys for which requests wait
        self._absent: frozenset[str | None] = frozenset()
        """The ids of keys for which requests waited, and which the issuer did not have."""
        self.trouble = ""
        """The reason why the last fetch failed; empty if it did not."""
        self.generation = 0
        """A number that changes whenever the keys do."""

    def find(self, kid: str | None, algorithm: str) -> Key | None:
        """Return the key with an id that suits an algorithm; without an id, the only key that suits."""
        some = [key for keys in self._keys.values() for key in keys] if kid is None else self._keys.get(kid, [])
        suited = [key for key in some if _suits(key, algorithm)]
        return suited[0] if len(suited) == 1 else None

    def has(self, thumbprint: str) -> bool:
        """Return whether the issuer still has the key with a thumbprint."""
        return thumbprint in self._thumbprints

    def may_fetch(self) -> bool:
        """Return whether the keys may be fetched now, for a token of an unknown key."""
        return self._fetching is not None or self._tried is None or self._clock() - self._tried >= RETRY

    def lacks(self, kid: str | None) -> bool:
        """Return whether the issuer was asked for the key with an id, and did not have it or it did not suit."""
        return kid in self._absent or kid in self._keys

    def retry_after(self) -> float:
        """Return the seconds until the keys may be fetched again."""
        return 0.0 if self._tried is None else max(0.0, self._tried + RETRY - self._clock())

    def refresh_if_old(self) -> None:
        """Begin to fetch the keys if they are old, or if the last attempt failed some time ago."""
        old = self._fetched is None or bool(self.trouble) or self._clock() - self._fetched >= REFRESH
        if old and self._fetching is None and self.may_fetch():
            self._begin()

    async def fetch(self, kid: str | None) -> None:
        """Fetch the keys for one that is unknown, or wait for the fetch under way. A failure is in `trouble`."""
        self._asked.add(kid)
        # Shielded: others may wait for it too.
        await asyncio.shield(self._fetching or self._begin())

    def _begin(self) -> asyncio.Future[None]:
        self._tried = self._clock()
        self._fetching = asyncio.ensure_future(self._fetch())
        return self._fetching

    async def _fetch(self) -> None:
        try:
            keys = await asyncio.wrap_future(DaemonExecutor("issuer-keys").submit(self._fetch_keys))
        except (OSError, http.client.HTTPException, ValueError, RecursionError, LoomError) as error:
            reason = str(error) or type(error).__name__
            if reason != self.trouble:
                logger.error("no keys from the OpenID issuer %s: %s; older keys stay valid", self._issuer, reason)
            self.trouble = reason
        else:
            self.trouble = ""
            self._fetched = self._clock()
            self._keys = keys
            thumbprints = frozenset(key.thumbprint() for some in keys.values() for key in some)
            self.generation += thumbprints != self._thumbprints
            self._thumbprints = thumbprints
            self._absent = frozenset(self._asked - keys.keys())
        finally:
            self._tried = self._clock()
            self._asked.clear()
            self._fetching = None

    def _fetch_keys(self) -> dict[str, list[Key]]:
        described = self._get(self._issuer.rstrip("/") + "/.well-known/openid-configuration")
        if described.get("issuer") != self._issuer:
            raise ValueError(f"it names itself {described.get('issuer')!r:.200}; give --oidc-issuer exactly so")
        where = described.get("jwks_uri")
        if not isinstance(where, str):
            raise ValueError("its description has no jwks_uri")
        check_url(where, "jwks_uri", loopback=_is_plain(self._issuer))
        listed = self._get(where).get("keys")
        if not isinstance(listed, list):
            raise ValueError(f"{where} has no list of keys")
        keys: dict[str, list[Key]] = {}
        for entry in listed[:MAX_KEYS]:
            if (key := _key(entry)) is not None:
                keys.setdefault(str(entry.get("kid") or key.thumbprint()), []).append(key)
        return keys

    def _get(self, url: str) -> dict[str, object]:
        until = time.monotonic() + FETCH_TIMEOUT
        request = urllib.request.Request(url, headers={"Accept": "application/json", "User-Agent": "monarch-loom"})
        content = b""
        try:
            response = self._opener.open(request, timeout=FETCH_TIMEOUT)
        except urllib.error.HTTPError as error:  # also for a redirect, which could lead anywhere
            error.close()
            raise ValueError(f"{url} answers with HTTP status {error.code}") from error
        except urllib.error.URLError as error:
            raise OSError(f"{url} cannot be read: {error.reason}") from error
        with response:
            while piece := response.read1(1 << 16):
                content += piece
                if len(content) > MAX_DOCUMENT:
                    raise ValueError(f"{url} has more than {MAX_DOCUMENT} bytes")
                if time.monotonic() > until:
                    raise TimeoutError(f"{url} took more than {FETCH_TIMEOUT:g} s")
        found = json.loads(content)
        if not isinstance(found, dict):
            raise ValueError(f"{url} has no JSON object")
        return found


def check_url(url: str, name: str, loopback: bool = True) -> None:
    """Check that a URL is ``https``, or ``http`` of this machine if that is allowed.

    Raises:
        WrongArguments: it is not.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise WrongArguments(f"{name} {url!r:.200} is no URL: {error}") from error
    if parts.scheme == "https" and parts.hostname:
        return
    if not (loopback and _is_plain(url)):
        raise WrongArguments(
            f"{name} {url!r:.200} is no https URL: a key that comes over http may be anybody's (http is for a "
            f"loopback address only)"
        )


def _is_plain(url: str) -> bool:
    """Return whether a URL is ``http`` of this machine."""
    parts = urlsplit(url)
    return parts.scheme == "http" and is_loopback(parts.hostname or "")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _opener(issuer: str, ca: str | None) -> urllib.request.OpenerDirector:
    check_url(issuer, "--oidc-issuer")
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    if _is_plain(issuer):
        handlers.append(urllib.request.ProxyHandler({}))
    else:
        try:
            handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca)))
        except ssl.SSLError as error:
            raise WrongArguments(f"--oidc-ca {ca} has no certificate in PEM: {error.reason}") from error
        except OSError as error:
            raise WrongArguments(f"cannot read --oidc-ca {ca}: {error.strerror or error}") from error
    return urllib.request.build_opener(*handlers)


def _key(entry: Any) -> Key | None:
    """Return the public key that an entry of a key set describes; None for one that signs no accepted token."""
    if not isinstance(entry, dict) or entry.get("kty") not in ("RSA", "EC", "OKP"):
        return None
    if entry.get("use", "sig") != "sig" or "verify" not in entry.get("key_ops", ["verify"]):
        return None
    if entry["kty"] == "RSA" and len(str(entry.get("n"))) * 6 < MIN_RSA:  # a character of base64 is 6 bits
        logger.warning("the OpenID issuer's key %.100r has fewer than %d bits", entry.get("kid"), MIN_RSA)
        return None
    try:
        key = JWKRegistry.import_key(entry)
    except (JoseError, ValueError, TypeError, KeyError) as error:
        logger.warning("the OpenID issuer's key %.100r is unusable: %s", entry.get("kid"), error)
        return None
    assert isinstance(key, (RSAKey, ECKey, OKPKey))
    return key


def _suits(key: Key, algorithm: str) -> bool:
    said: Mapping[str, Any] = key.as_dict(private=False)
    if said.get("alg", algorithm) != algorithm:
        return False
    return said.get("crv") == _CURVES.get(algorithm) and (said["kty"] == "RSA") == (algorithm not in _CURVES)
