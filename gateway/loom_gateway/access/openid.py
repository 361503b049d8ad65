"""OpenID Connect as a second way in: tokens that an issuer signs, such as Keycloak, Dex, Okta or Entra ID.

The server makes it only for a gateway with an issuer, so joserfc is needed there alone.
"""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from joserfc import jws
from joserfc.errors import ClaimError, ExpiredTokenError, JoseError, MissingClaimError, UnsupportedAlgorithmError
from joserfc.jws import JWSRegistry
from joserfc.jwt import JWTClaimsRegistry

from loom.errors import AuthenticationError, IssuerUnreachable, ScopeError, TokenRevoked, WrongArguments
from loom.token_file import OPENID_PREFIX, SCOPES, Token, digest
from loom_gateway.access.issuer_keys import ALGORITHMS, IssuerKeys
from loom_gateway.access.token_authority import KeyWanted, SignedToken
from loom_gateway.settings import GatewaySettings

MAX_TOKEN = 16 << 10  # characters of a token at most
MAX_NAME = 255  # characters of a subject at most (OpenID Connect Core, section 2)

CLOCK_SKEW = 60.0
"""Seconds that the issuer's clock may be ahead of this machine's. A token expires at the time it says."""

LATEST = 1e11
"""Seconds since the epoch before which a token has to expire. A larger number, or none, is no time."""

ACCEPTED = 10_000
"""Accepted tokens to remember, so that each is verified once. The one shown longest ago is forgotten first."""

_TYPES = frozenset({"jwt", "at+jwt", "application/at+jwt"})
"""The types of ID tokens and of access tokens (RFC 9068). A logout token is of another (RFC 8725, section 3.11)."""


class OpenIdIssuer:
    """Checks the tokens of one issuer: signature, issuer, audience and times. The user is the token's subject.

    Args:
        issuer: the issuer's URL, exactly as its tokens name it.
        audiences: the token has to be for one of these.
        scope: the scope of each user; None: only that of a user's claims.
        scope_claim: the claim that gives users a scope; ``a.b`` finds ``b`` within ``a``. None: no claim does.
        grants: values of that claim, each with its scope; ``loom:SCOPE`` means SCOPE anyway.
        user_claim: the claim with the user's name.
        ca: PEM file of the authority that vouches for the issuer.
        keys: the issuer's keys; for tests.
        clock: returns the time in seconds since the epoch.

    Raises:
        WrongArguments: a value makes no sense.
    """

    def __init__(
        self,
        issuer: str,
        audiences: Sequence[str],
        scope: str | None = None,
        scope_claim: str | None = None,
        grants: Mapping[str, str] | None = None,
        user_claim: str = "sub",
        ca: str | None = None,
        keys: IssuerKeys | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not audiences:
            raise WrongArguments(
                "--oidc-issuer needs --oidc-audience, usually the client id: without it, tokens that the issuer "
                "made for any other program would be accepted"
            )
        if scope is None and scope_claim is None:
            raise WrongArguments(
                "--oidc-issuer needs --oidc-scope, the scope of everyone whom the issuer knows, or "
                "--oidc-scope-claim, the claim that says a user's scope"
            )
        if grants and scope_claim is None:
            raise WrongArguments("--oidc-grant needs --oidc-scope-claim, the claim whose values it names")
        self._grants = {f"loom:{one}": one for one in SCOPES} | dict(grants or {})
        for given in (scope, *self._grants.values()):
            if given is not None and given not in SCOPES:
                raise WrongArguments(f"there is no scope {given!r}; choose one of {', '.join(SCOPES)}")
        self.keys = keys or IssuerKeys(issuer, ca)
        self._issuer = issuer
        self._scope = scope
        self._scope_claim = scope_claim
        self._user_claim = user_claim
        self._clock = clock
        self._registry = _Registry(strict_check_header=False)  # unknown fields of a header are no error (RFC 7515)
        self._claims = JWTClaimsRegistry(
            now=lambda: int(clock()),
            leeway=int(CLOCK_SKEW),
            iss={"essential": True, "value": issuer},
            aud={"essential": True, "values": list(audiences)},
            exp={"essential": True},
            sub={"essential": True},
        )
        self._accepted: OrderedDict[str, SignedToken] = OrderedDict()
        """By digest, the one that was shown last at the end."""
        self._generation = self.keys.generation

    @classmethod
    def of(cls, settings: GatewaySettings) -> OpenIdIssuer:
        """Return the issuer that a gateway's settings name."""
        assert settings.oidc_issuer is not None
        return cls(
            settings.oidc_issuer,
            settings.oidc_audience,
            settings.oidc_scope,
            settings.oidc_scope_claim,
            dict(_grant(given) for given in settings.oidc_grant),
            settings.oidc_user_claim,
            str(settings.oidc_ca) if settings.oidc_ca else None,
        )

    def check(self, text: str) -> Token:
        """Return the record of a token, in which id and name are the user's.

        Raises:
            AuthenticationError: this gateway does not accept the token; the text says why.
            TokenRevoked: the token has expired, or the issuer took its key back.
            ScopeError: the user has no scope.
            KeyWanted: the key is unknown, and can be fetched now.
            IssuerUnreachable: the key is unknown, and the issuer does not answer.
        """
        if self._generation != self.keys.generation:
            self._generation = self.keys.generation
            self._accepted.clear()
        shown = digest(text)
        token = self._accepted.get(shown)
        if token is not None:
            self._accepted.move_to_end(shown)
            self.confirm(token)
            return token
        token = self._accepted[shown] = self._verified(text)
        if len(self._accepted) > ACCEPTED:
            self._accepted.popitem(last=False)
        return token

    def confirm(self, token: Token, now: float | None = None) -> None:
        """Check that a token that was accepted is still valid; one of the token file is. ``now``: the time of day.

        Raises:
            TokenRevoked: it has expired, or the issuer took its key back.
        """
        if not isinstance(token, SignedToken):
            return
        if token.state(self._clock() if now is None else now) != "valid":
            raise _expired(token.name)
        if not self.keys.has(token.key):
            raise TokenRevoked(
                f"the key that signed the OpenID token of {token.name!r} is no key of the issuer any more: get a "
                f"new token and connect with it"
            )

    def refresh(self) -> None:
        self.keys.refresh_if_old()

    def _verified(self, text: str) -> SignedToken:
        if len(text) > MAX_TOKEN:
            raise _refused(f"it has more than {MAX_TOKEN} characters")
        try:
            signature = jws.extract_compact(text.encode(), registry=self._registry)
            header = signature.headers()
        except (JoseError, ValueError, TypeError) as error:
            raise _refused("it is no signed token (JWT)") from error
        kid, algorithm, kind = header.get("kid"), header.get("alg"), header.get("typ", "JWT")
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise _refused(f"it is signed with {algorithm!r:.40}, and not with a public key")
        if not isinstance(kind, str) or kind.lower() not in _TYPES:
            raise _refused(f"it is of the type {kind!r:.40}, and neither an ID token nor an access token")
        if kid is not None and not isinstance(kid, str):
            raise _refused("the id of its key is no text")
        key = self.keys.find(kid, algorithm)
        if key is None:
            raise self._unknown_key(kid, algorithm)
        try:
            if not jws.validate_compact(signature, key, registry=self._registry):
                raise _refused("its signature is wrong")
            claims = json.loads(signature.payload)
        except (JoseError, ValueError, TypeError, RecursionError) as error:
            raise _refused("it is no signed token (JWT)") from error
        if not isinstance(claims, dict) or "events" in claims:  # a logout or another event, not a sign-in
            raise _refused("it is neither an ID token nor an access token")
        user, scope, expires = self._said(claims)
        return SignedToken(user, user, scope, digest(text), self._clock(), expires, key=key.thumbprint())

    def _unknown_key(self, kid: str | None, algorithm: str) -> AuthenticationError | IssuerUnreachable:
        if self.keys.may_fetch():
            return KeyWanted(f"the key {kid!r:.100} is to be fetched", partial(self.keys.fetch, kid))
        if self.keys.lacks(kid):
            return _refused(f"the issuer has no key {kid!r:.100} for {algorithm}")
        why = "does not give its keys (the gateway's log says why)" if self.keys.trouble else "was asked just now"
        return IssuerUnreachable(
            f"this gateway does not know the key {kid!r:.100} of the OpenID token, and the issuer {self._issuer} "
            f"{why}: try again in {math.ceil(self.keys.retry_after())} s"
        )

    def _said(self, claims: Mapping[str, Any]) -> tuple[str, str, float]:
        """Return the user, the scope, and the time at which the token expires."""
        try:
            self._claims.validate(dict(claims))
        except ExpiredTokenError as error:
            raise _expired(self._user(claims)) from error
        except MissingClaimError as error:
            raise _refused(f"it lacks the claim {error.description or error}") from error
        except ClaimError as error:
            raise _refused(self._wrong_claim(claims, error)) from error
        user = self._user(claims)
        expires = claims["exp"]
        if not expires < LATEST:
            raise _refused(f"its claim exp is {expires!r:.40}")
        if expires <= self._clock():  # the registry allows for clocks that differ
            raise _expired(user)
        return user, self._scope_of(claims, user), float(expires)

    def _wrong_claim(self, claims: Mapping[str, Any], error: ClaimError) -> str:
        name = str(error.claim)
        said = claims.get(name)
        if name == "iss":
            return f"its issuer is {said!r:.200}, and not {self._issuer!r}"
        if name == "aud":
            return f"it is for {said!r:.200} (aud), and not for this gateway (--oidc-audience)"
        if name in ("nbf", "iat"):
            return f"it is not valid yet ({name} is {said!r:.40})"
        return f"its claim {name} is {said!r:.100}"

    def _user(self, claims: Mapping[str, Any]) -> str:
        name = claims.get(self._user_claim)
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.strip()) <= MAX_NAME:
            raise _refused(f"its claim {self._user_claim} is no user's name: {name!r:.100}")
        if self._user_claim == "email" and claims.get("email_verified", True) not in (True, "true"):
            raise _refused(f"its issuer did not verify the address {name!r}")
        return OPENID_PREFIX + name

    def _scope_of(self, claims: Mapping[str, Any], user: str) -> str:
        """Return the largest scope that a user has by default or by a claim."""
        values = _claim(claims, self._scope_claim) if self._scope_claim else None
        words = values.split() if isinstance(values, str) else values if isinstance(values, list) else []
        scopes = [self._grants[word] for word in words if isinstance(word, str) and word in self._grants]
        if self._scope is not None:
            scopes.append(self._scope)
        if not scopes:
            raise ScopeError(
                f"the OpenID token of {user!r} is valid, but nothing in its claim {self._scope_claim} gives it a "
                f"scope in this gateway: ask who runs it (--oidc-grant), or get a token that has the claim"
            )
        return max(scopes, key=SCOPES.index)


class _Registry(JWSRegistry):
    """Accepts `ALGORITHMS`, among them ``EdDSA``, which joserfc only takes with a warning."""

    max_header_length = 4096  # with a chain of certificates in it, a header has more than joserfc's 512 bytes

    def get_alg(self, name: str) -> Any:
        if name not in ALGORITHMS:
            raise UnsupportedAlgorithmError(f"{name!r} is not accepted")
        return self.algorithms[name]


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """Return the value of a claim. A name with dots may be a path, such as ``realm_access.roles``."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _grant(given: str) -> tuple[str, str]:
    value, _, scope = given.rpartition("=")
    if not value or not scope:
        raise WrongArguments(f"--oidc-grant {given!r} is not VALUE=SCOPE, such as ml-team=drive")
    return value, scope


def _refused(why: str) -> AuthenticationError:
    return AuthenticationError(f"this gateway does not accept the OpenID token: {why}")


def _expired(user: str) -> TokenRevoked:
    return TokenRevoked(f"the OpenID token of {user!r} has expired: get a new one and connect with it")
