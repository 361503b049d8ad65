"""`AlertOperator`: what the operator of a gateway allows alerts to reach.

The gateway writes it into the weaver's folder each time that it starts, because a weaver outlives its gateway.
"""

from __future__ import annotations

import ipaddress
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from loom.errors import WrongArguments
from loom.process.state_file import write_json


@dataclass(frozen=True)
class AlertOperator:
    """The permissions of a gateway's operator."""

    FILE: ClassVar[str] = "alerts.json"
    """Its file, in the weaver's folder."""

    mail: tuple[str, ...] = ()
    """The e-mail command with its arguments; empty: no e-mail."""
    networks: tuple[str, ...] = ()
    """Networks of addresses that are not public, and that webhooks may reach."""
    page: str = ""
    """The address of the page; empty: alerts have no link."""

    @classmethod
    def made(cls, mail: str | None, networks: Sequence[str], page: str) -> AlertOperator:
        """Return the permissions that options name; raise `WrongArguments` if they make no sense."""
        for network in networks:
            try:
                ipaddress.ip_network(network, strict=False)
            except ValueError as error:
                raise WrongArguments(f"--alert-network {network!r:.80}: {error}") from None
        try:
            command = shlex.split(mail or "")
        except ValueError as error:
            raise WrongArguments(f"--alert-mail: {error}") from None
        return cls(tuple(command), tuple(networks), page)

    def write(self, folder: Path) -> None:
        write_json(folder / self.FILE, asdict(self))

    @classmethod
    def read(cls, path: Path) -> AlertOperator:
        """Return what a gateway has written; nothing is allowed if it has written nothing."""
        try:
            found = json.loads(path.read_text())
            return cls(tuple(found["mail"]), tuple(found["networks"]), str(found["page"]))
        except (OSError, ValueError, KeyError, TypeError):
            return cls()

    def url_of(self, run: str | None) -> str | None:
        if not self.page:
            return None
        return self.page if run is None else f"{self.page}#/runs/{quote(run, safe='')}"
