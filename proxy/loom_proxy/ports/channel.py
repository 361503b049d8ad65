"""Channels, which open ports: an actor sends to the one end, this program receives from the other.

The driver opens the port as a real Monarch port. Its `Port` can be an argument of endpoints, constructors and
`loom.send`, and arrives there as the Monarch port.
"""

from __future__ import annotations

import weakref
from typing import Generic, Protocol, TypeVar

from loom.errors import WrongState
from loom.in_cluster import in_cluster, monarchs
from loom_proxy.ports.port import Port
from loom_proxy.ports.receiver import PortReceiver, Ports, RankedPortReceiver

R = TypeVar("R")


class HasPorts(Protocol):
    """A job, whose session has ports."""

    session: str
    _ports: Ports

    @property
    def closed(self) -> bool:
        """Whether the job's connection to its session is over."""


open_jobs: weakref.WeakSet[HasPorts] = weakref.WeakSet()  # every job of this program that may be open


class Channel(Generic[R]):
    """A factory of ports; the counterpart of ``monarch.actor.Channel``."""

    @staticmethod
    def open(once: bool = False, *, job: HasPorts | None = None) -> tuple[Port[R], PortReceiver[R]]:
        """Open a port whose messages come to this program.

        Args:
            once: the port takes one message only.
            job: the job whose session gets the port; may be left out if the program has one open job. Without it,
                inside an actor or a function of `Job.run`, Monarch's own ``Channel`` opens the port.

        Raises:
            NoOpenJob: no job was given, and the program has none open, or several.
        """
        if job is None and in_cluster():
            return monarchs().Channel.open(once)  # type: ignore[no-any-return]
        return _ports_of(job).open(once)

    @staticmethod
    def open_ranked(once: bool = False, *, job: HasPorts | None = None) -> tuple[Port[R], RankedPortReceiver[R]]:
        """Open a port, as `open` does, whose messages are received as ``(rank, message)``."""
        if job is None and in_cluster():
            return monarchs().Channel.open_ranked(once)  # type: ignore[no-any-return]
        port, receiver = Channel[R].open(once, job=job)
        return port, receiver.ranked()


def _ports_of(job: HasPorts | None) -> Ports:
    if job is None:
        found = [one for one in open_jobs if not one.closed]
        if not found:
            raise WrongState(
                "a channel needs an open job: call loom.local() or loom.connect() first", code="no_open_job"
            )
        if len(found) > 1:
            names = ", ".join(sorted(repr(one.session) for one in found))
            raise WrongState(
                f"this program has several open jobs ({names}): say which, with job.channel() or job=…",
                code="no_open_job",
            )
        (job,) = found
    job._ports.caller.check_open()
    return job._ports
