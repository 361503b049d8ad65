"""``slurm://NAME``: the gateway in an allocation of Slurm, which is followed when it moves.

From within the cluster it is reached directly, and from elsewhere through a port that ssh forwards. Either way the
gateway has to prove that it knows the token before the token is shown to it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from loom.errors import AllocationFailed, GatewayUnreachable, LoomError, Unavailable
from loom.mutual_auth.over_http import note_forwarded
from loom.process.backoff import Backoff
from loom.process.listen import bracketed, free_ports
from loom.process.threads import start_thread
from loom.slurm.address import SlurmAddress, parse_slurm_address
from loom.slurm.allocation import Allocation, how_it_ended, progress
from loom.slurm.folder import GatewayFacts
from loom.slurm.login import LocalLogin
from loom.slurm.queue import QueuedJob
from loom.slurm.ssh import FORWARDS, SshLogin
from loom_proxy.forwarded_port import ForwardedPort

logger = logging.getLogger(__name__)

HEARD_WITHIN = 1.0
"""Seconds within which ssh has said why it does not pass on a connection that it has closed."""

COMES_WITHIN = Backoff(0.5, 5.0)
"""Seconds between two looks for a gateway that is to come."""

LOOK_EVERY = Backoff(2.0, 30.0)
"""Seconds between two looks at whether an allocation has ended whose gateway does not answer."""

_PROHIBITED = re.compile("open failed: (?:administratively prohibited|unknown channel type)")


class GatewayInSlurm(NamedTuple):
    """The address of the gateway in an allocation."""

    address: SlurmAddress

    def open(self, timeout: float = 0.0) -> DirectRoute | SlurmForward:
        """Return the way to the gateway, with its token.

        Args:
            timeout: seconds to wait for the gateway of an allocation that waits in the queue, or starts.

        Raises:
            UnknownAllocation: this user has no allocation of the name.
            AllocationFailed: the allocation has ended, or its folder cannot be read.
            GatewayUnreachable: the gateway does not run yet; the text has the queue's reason.
            LoginRefused, LoginUnreachable: ssh does not get to the login node.
            MissingDependency: there is no ssh on this machine.
        """
        if self.address.login is None:
            return DirectRoute(self.address, timeout)
        return SlurmForward(self.address, SshLogin(self.address.login), timeout)


def gateway_in_slurm(url: str) -> GatewayInSlurm:
    """Read ``slurm://[[USER@]LOGIN[:PORT]/]NAME``."""
    return GatewayInSlurm(parse_slurm_address(url))


class DirectRoute:
    """The way to the gateway of an allocation from within its cluster."""

    def __init__(self, address: SlurmAddress, timeout: float) -> None:
        self.name = str(address)
        self._over: LoomError | None = None
        self._allocation = Allocation.find(LocalLogin(), address.name)
        self.token = self._allocation.token()
        self._end = AllocationEnd(self._allocation)
        self.url = ""
        self._lead_to(_first_gateway(self._allocation, timeout))

    def renew(self) -> None:
        """Look where the gateway is now, because it does not answer.

        Raises:
            LoomError: the error for which this way was closed.
        """
        if self._over is not None:
            raise self._over
        with contextlib.suppress(LoomError):  # it is looked for again
            if (facts := self._allocation.gateway()) is not None:
                self._lead_to(facts)

    def why_not(self) -> LoomError | None:
        """Return why the gateway does not answer, if Slurm knows."""
        return _why_not(self._allocation)

    def gone(self) -> str | None:
        """Return why there will be no gateway any more, if that is known by now."""
        return self._end.known()

    def close(self, error: LoomError | None = None) -> None:
        """Note that the way is not used any more, for an error if there is one."""
        self._over = error

    def _lead_to(self, facts: GatewayFacts) -> None:
        # Another program may have the port by now.
        note_forwarded(facts.port, facts.host)
        self.url = f"ws://{bracketed(facts.host)}:{facts.port}"


class SlurmForward(ForwardedPort):
    """A port of this machine that leads to the gateway of an allocation, by ssh to a login node."""

    def __init__(self, address: SlurmAddress, login: SshLogin, timeout: float) -> None:
        self._login = login
        self._timeout = timeout
        self._prohibited = threading.Event()
        """Set when the login node is found to forward no ports."""
        self._forwarded: tuple[int, str, int] | None = None
        """The port of this machine, and the host and the port to which it leads."""
        try:
            self._allocation = Allocation.find(login, address.name)
            self.token = self._allocation.token()
            self._end = AllocationEnd(self._allocation)
            super().__init__(str(address), f"ssh to the gateway of {address.name} by way of {login.name}")
        except BaseException:
            login.close()
            raise

    def why_not(self) -> LoomError | None:
        """Return why the gateway does not answer, if ssh or Slurm knows."""
        if self._prohibited.wait(HEARD_WITHIN):
            return Unavailable(
                f"{self._login.name} forwards no ports (AllowTcpForwarding in its sshd_config): ask the site for a "
                "login node that does, or run your program there",
                code="port_forward_failed",
            )
        return _why_not(self._allocation)

    def gone(self) -> str | None:
        """Return why there will be no gateway any more, if that is known by now."""
        return self._end.known()

    def close(self, error: LoomError | None = None) -> None:
        super().close(error)
        self._login.close()

    def _command(self, port: int) -> Sequence[str]:
        facts = self._allocation.gateway() if self.starts else _first_gateway(self._allocation, self._timeout)
        if facts is None:
            raise GatewayUnreachable(f"the gateway of {self.name} has not come back yet")
        self._forwarded = port or free_ports(1)[0], facts.host, facts.port
        return self._login.forwarding(*self._forwarded)

    def _port_in(self, line: str) -> int | None:
        return self._forwarded[0] if self._forwarded and line.endswith(FORWARDS) else None

    def _hear(self, line: str) -> bool:
        logger.info("ssh to %s: %s", self._login.name, line)
        if _PROHIBITED.search(line):
            self._prohibited.set()
        return False

    def _tidy(self) -> None:
        if self._forwarded is not None:
            self._login.unforward(*self._forwarded)


class AllocationEnd:
    """Whether an allocation has ended, which is looked up in the background, not too often."""

    def __init__(self, allocation: Allocation) -> None:
        self._allocation = allocation
        self._why: str | None = None
        self._lock = threading.Lock()
        self._look_from = 0.0  # the time from which it is looked up again
        self._waits = iter(LOOK_EVERY)

    def known(self) -> str | None:
        """Return why the allocation has ended, as far as this is known now; None if it may live."""
        with self._lock:
            late = time.monotonic() - self._look_from
            if self._why is None and late > 0:
                if late > LOOK_EVERY.most:  # the gateway has answered since
                    self._waits = iter(LOOK_EVERY)
                self._look_from = math.inf
                start_thread(f"look for {self._allocation.name}", self._look)
            return self._why

    def _look(self) -> None:
        why = _why_not(self._allocation)
        with self._lock:
            self._why = str(why) if isinstance(why, AllocationFailed) else None
            self._look_from = time.monotonic() + next(self._waits)


def _first_gateway(allocation: Allocation, timeout: float) -> GatewayFacts:
    """Return where the gateway is, after some seconds if it is to come."""
    until = time.monotonic() + timeout
    for pause in COMES_WITHIN:
        if (facts := allocation.gateway()) is not None:
            return facts
        error = _error_for(allocation, allocation.job())
        if isinstance(error, AllocationFailed) or time.monotonic() + pause > until:
            raise error
        time.sleep(pause)
    raise AssertionError("the pauses never end")


def _why_not(allocation: Allocation) -> LoomError | None:
    """Return why the gateway of an allocation does not answer; None if Slurm knows nothing of it."""
    try:
        job = allocation.job()
    except LoomError as error:
        logger.info("Slurm does not tell of the allocation %s: %s", allocation.name, error)
        return None
    return _error_for(allocation, job) if job is None or job.state.waits or job.state.is_over else None


def _error_for(allocation: Allocation, job: QueuedJob | None) -> LoomError:
    if job is None or job.state.is_over:
        how = "is not known to Slurm any more" if job is None else how_it_ended(job)
        number = allocation.job_id if job is None else job.id
        return AllocationFailed(
            f"the allocation {allocation.name} has ended: its job {number} {how}; `loom slurm list` shows those "
            "that live"
        )
    return GatewayUnreachable(f"the gateway of the allocation does not run yet: {progress(allocation.name, job)}")
