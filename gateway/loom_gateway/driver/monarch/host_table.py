"""The worker hosts of a session: the current address of each, and which are gone.

Monarch's host mesh of the session knows the first addresses only. Processes on a host that has moved are started
through another mesh, which was attached to the host's new address.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from loom.errors import SupervisionError
from loom_gateway.driver.monarch.root_client import attach


class HostTable:
    """The hosts of one session, by number. Safe on any thread."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)
        self.lost: set[int] = set()  # numbers of the hosts that are gone
        self._reasons: dict[int, str] = {}  # why they are, by number
        self.moved: set[int] = set()  # numbers of the hosts whose address has changed since the session was opened
        self._at: dict[tuple[str, ...], Any] = {}  # meshes of moved hosts, by their addresses
        self._attached: list[Any] = []

    def check(self, hosts: Iterable[int]) -> None:
        gone = sorted(self.lost.intersection(hosts))
        if gone:
            named = " and ".join(
                f"worker host {host} at {self.addresses[host]}{self._reason(host)}" for host in gone
            )
            raise SupervisionError(
                f"{named} {'is' if len(gone) == 1 else 'are'} gone: slice the hosts that live or, if a worker was "
                f"started there again, call job.refresh_hosts() first"
            )

    def _reason(self, host: int) -> str:
        return f" ({reason})" if (reason := self._reasons.get(host)) else ""

    def lose(self, host: int, reason: str) -> None:
        """Note that a host is gone, and why."""
        self._reasons[host] = reason
        self.lost.add(host)

    def mesh_on(self, hosts: tuple[int, ...], mesh: Any, python: str = "") -> Any:
        """Return the host mesh on which to start processes of some hosts, at their current addresses.

        ``mesh`` is Monarch's mesh of them, with the first addresses; ``python`` an interpreter instead of its own.
        """
        if self.moved.isdisjoint(hosts):
            return mesh
        addresses = tuple(self.addresses[host] for host in hosts)
        if addresses not in self._at:
            self._at[addresses] = self.attach_to(list(addresses))
        there = self._at[addresses]
        return there.with_python_executable(python) if python else there

    def attach_to(self, addresses: list[str]) -> Any:
        mesh = attach(addresses, f"back{len(self._attached)}")
        self._attached.append(mesh)  # Monarch might stop the processes of a host mesh without references
        return mesh

    def move(self, host: int, address: str) -> None:
        self.addresses[host] = address
        self.moved.add(host)

    def back_at(self, host: int, mesh: Any) -> None:
        """Note that a host is back, as a new host mesh of its own."""
        if host in self.moved:
            self._at[(self.addresses[host],)] = mesh
