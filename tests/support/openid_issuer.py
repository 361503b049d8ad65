"""A real OpenID Connect issuer on loopback: npm's ``oidc-provider``, which is fetched once."""

from __future__ import annotations

import base64
import hashlib
import http.cookiejar
import json
import os
import secrets
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urljoin, urlsplit

from joserfc.jwk import RSAKey

from loom.process.listen import free_ports
from tests.support.needs import skip_because

__all__ = ["OpenIdIssuerProcess", "fetch_provider"]

VERSION = "9.13.3"
BOUND = 60.0
"""Seconds; far over what anything takes, so that only a hang fails."""

BACK = "http://127.0.0.1/back"


def fetch_provider() -> Path:
    """Return the module of ``oidc-provider``. Skip the test where it cannot be fetched."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        skip_because("the programs node and npm (Debian packages nodejs and npm) are not installed")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loom-tests"
    folder = cache / f"oidc-provider-{VERSION}"
    module = folder / "node_modules/oidc-provider/lib/index.js"
    if not module.exists():
        cache.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=cache))
        try:
            options = ["--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(fresh)]
            done = subprocess.run(
                ["npm", "install", *options, f"oidc-provider@{VERSION}"],
                capture_output=True,
                text=True,
                timeout=BOUND * 2,
                stdin=subprocess.DEVNULL,
            )
            if done.returncode != 0:
                skip_because(f"npm cannot fetch oidc-provider: {done.stderr.strip()[-500:]}")
            if not folder.exists():  # another process may have been faster
                fresh.rename(folder)
        except subprocess.TimeoutExpired:
            skip_because("npm does not fetch oidc-provider in time")
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return module


class OpenIdIssuerProcess:
    """An issuer that knows every user. A context manager; it does not outlive this process.

    Args:
        roles: the claim ``roles`` of users.
        token_seconds: how long its tokens are valid.
    """

    def __init__(self, roles: dict[str, list[str]] | None = None, token_seconds: int = 600) -> None:
        self._module = fetch_provider()
        (self._port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self._port}"
        self.token_seconds = token_seconds
        self._roles = roles or {}
        self._keys = [_new_key("first")]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> OpenIdIssuerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, on the port that it had before."""
        keys = [key.as_dict(private=True) for key in self._keys]
        settings = {
            "port": self._port,
            "jwks": {"keys": keys},
            "tokenSeconds": self.token_seconds,
            "roles": self._roles,
        }
        script = Path(__file__).with_suffix(".mjs")
        self._process = subprocess.Popen(
            ["node", str(script), str(self._module), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == "listening":
                return
        raise AssertionError(f"the issuer did not start: {self._process.communicate(timeout=BOUND)[1]}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=BOUND)  # closes its standard input
            self._process = None

    def rotate(self, name: str, keep: bool = True) -> None:
        """Sign with a new key from now on; ``keep`` the former ones in the set."""
        self.stop()
        self._keys = [_new_key(name), *(self._keys if keep else [])]
        self.start()

    def sign_in(self, user: str) -> str:
        """Sign a user in, as a browser does, and return the ID token."""
        browser = _Browser()
        verifier = secrets.token_urlsafe(32)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).decode().rstrip("=")
        query = {
            "client_id": "loom",
            "response_type": "code",
            "redirect_uri": BACK,
            "scope": "openid",
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        page = browser.visit(f"{self.url}/auth?{urlencode(query)}")
        page = browser.visit(page, {"prompt": "login", "login": user, "password": "any"})
        back = browser.visit(page, {"prompt": "consent"})
        code = parse_qs(urlsplit(back).query)["code"][0]
        grant = {
            "grant_type": "authorization_code",
            "client_id": "loom",
            "redirect_uri": BACK,
            "code": code,
            "code_verifier": verifier,
        }
        with urllib.request.urlopen(f"{self.url}/token", urlencode(grant).encode(), timeout=BOUND) as response:
            token: str = json.load(response)["id_token"]
        return token


def _new_key(name: str) -> RSAKey:
    return RSAKey.generate_key(2048, {"kid": name, "use": "sig", "alg": "RS256"})


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class _Browser:
    """Follows redirects with cookies, up to a page or to where the issuer sends the user back."""

    def __init__(self) -> None:
        # The issuer's session cookies have no port, and are sent to the same host.
        self._opener = urllib.request.build_opener(
            urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()), _NoRedirect()
        )

    def visit(self, url: str, form: dict[str, str] | None = None) -> str:
        """Return the URL at which the redirects end."""
        data = None if form is None else urlencode(form).encode()
        while not url.startswith(BACK):
            try:
                with self._opener.open(url, data, timeout=BOUND):
                    return url
            except urllib.error.HTTPError as error:
                with error:
                    if error.code not in (302, 303):
                        raise AssertionError(f"{url} answers {error.code}: {error.read()[:1000]!r}") from error
                    url, data = urljoin(url, error.headers["location"]), None
        return url
