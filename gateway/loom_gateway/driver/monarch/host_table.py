"""The worker hosts of a session: where each is now, and which are gone.

Monarch's host mesh of the session knows the first addresses only. What is started on a host that has moved is
started through a mesh that was attached to it afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from loom.errors import SupervisionError
from loom_gateway.driver.monarch.root_client import attach


class HostTable:
    """The hosts of one session, by number. On any thread.

    Args:
        addresses: where they are.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)
        self.lost: set[int] = set()
        """Numbers of those that are gone."""
        self.moved: set[int] = set()
        """Numbers of those that are not where they were when the session was opened."""
        self._at: dict[tuple[str, ...], Any] = {}
        self._attached: list[Any] = []

    def check(self, hosts: Iterable[int]) -> None:
        """Raise `SupervisionError` if one of the hosts is gone."""
        gone = sorted(self.lost.intersection(hosts))
        if gone:
            named = " and ".join(f"worker host {host} at {self.addresses[host]}" for host in gone)
            raise SupervisionError(
                f"{named} {'is' if len(gone) == 1 else 'are'} gone: slice the hosts that live or, if a worker was "
                f"started there again, call job.refresh_hosts() first"
            )

    def mesh_on(self, hosts: tuple[int, ...], mesh: Any, python: str = "") -> Any:
        """Return what to start processes with on some hosts, wherever they are now.

        Args:
            hosts: their numbers.
            mesh: Monarch's host mesh of them, as they were when the session was opened.
            python: the interpreter that it starts, if it is not the workers' own.
        """
        if self.moved.isdisjoint(hosts):
            return mesh
        addresses = tuple(self.addresses[host] for host in hosts)
        if addresses not in self._at:
            self._at[addresses] = self.attach_to(list(addresses))
        there = self._at[addresses]
        return there.with_python_executable(python) if python else there

    def attach_to(self, addresses: list[str]) -> Any:
        """Return a new host mesh of the workers at these addresses."""
        mesh = attach(addresses, f"back{len(self._attached)}")
        self._attached.append(mesh)  # Monarch might stop what is on a host mesh that nobody holds
        return mesh

    def move(self, host: int, address: str) -> None:
        """Note that a host is at another address now."""
        self.addresses[host] = address
        self.moved.add(host)

    def back_at(self, host: int, mesh: Any) -> None:
        """Note that a host is there again, as a new host mesh of its own."""
        if host in self.moved:
            self._at[(self.addresses[host],)] = mesh
