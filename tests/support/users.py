"""A gateway with several users, who distrust each other."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import loom
from loom.rest_client import Gateway as Rest
from loom.token_file import TokenFile
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import BOUND, Gateway
from tests.support.page_socket import PageSocket, page_socket

USERS = {"ann": "drive", "bob": "drive", "root": "admin"}


class House:
    """A gateway with the users `USERS`, and an audit. ``before`` begins its command line."""

    def __init__(self, workers: Sequence[str], folder: Path, *options: str, before: Sequence[str] = ()) -> None:
        self.file = TokenFile(folder / "tokens.json")
        self.tokens = {user: self.file.create(user, scope)[1] for user, scope in USERS.items()}
        self.audit_path = folder / "audit"
        files = ["--tokens", str(self.file.path), "--audit", str(self.audit_path)]
        self.gateway = Gateway(workers, *files, *options)
        self.gateway.folder.chmod(0o711)
        self.gateway.before = before
        self.gateway.start()

    @property
    def url(self) -> str:
        return self.gateway.url

    def connect(self, user: str, session: str | None = None, **options: Any) -> loom.Job:
        return loom.connect(self.url, self.tokens[user], session, **options)

    def watch(self, user: str, session: str, **options: Any) -> loom.Job:
        return self.connect(user, session, mode="watch", **options)

    def rest(self, user: str) -> Rest:
        return Rest(self.url, self.tokens[user])

    def weaver(self, user: str, named: str | None = None) -> WeaverProxy:
        """The weaver, for a user; an admin may name another one."""
        return WeaverProxy(self.url, self.tokens[user], user=named)

    def page(self, user: str = "ann", query: str = "") -> AbstractContextManager[PageSocket]:
        """A socket of a user's page."""
        return page_socket(self.url, self.tokens[user], query)

    def sees(self, user: str) -> set[str]:
        return {one["name"] for one in self.rest(user).sessions()}

    def answer(self, user: str, method: str, path: str, body: object = None) -> tuple[int, str]:
        """The status and the body of what is answered."""
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.replace("ws:", "http:") + path, content, method=method)
        request.add_header("Authorization", f"Bearer {self.tokens[user]}")
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=BOUND) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def audit(self, **wanted: Any) -> list[dict[str, Any]]:
        """The audit's lines that have these values."""
        lines = [json.loads(line) for line in self.audit_path.read_text().splitlines()]
        return [line for line in lines if all(line.get(name) == value for name, value in wanted.items())]
