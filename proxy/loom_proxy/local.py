"""A cluster of child processes on this machine, for `loom.local` and ``loom up``.

Its gateway and workers are those of a real cluster, reached through a real WebSocket.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from loom.errors import LoomError, PortInUse
from loom.extras import GATEWAY_MODULES, require
from loom.process.child import Child, python
from loom.process.listen import free_ports

if TYPE_CHECKING:
    from loom_proxy.job import Job


ATTEMPTS = 3  # attempts to start the workers if other programs take their ports
GATEWAY_GRACE = 5.0  # seconds that the gateway has to end its sessions when the cluster is closed
WORKER_GRACE = 3.0  # seconds that the workers have to end their processes when the cluster is closed


def local(
    hosts: int = 1,
    *,
    port: int = 0,
    token: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> Job:
    """Start workers and a gateway as child processes and connect to them.

    The children end when the job is closed, and in any case when this process ends.

    Args:
        hosts: number of workers; the size of the dimension ``hosts``.
        port: port of the gateway; 0 picks a free one.
        token: token that clients must show; generated if none is given.
        env: environment variables for the workers and the gateway, on top of this process's.
        timeout: seconds until every child must be ready.

    Raises:
        MissingDependency: the extra ``gateway`` is not installed.
        PortInUse: another program listens on ``port``.
        LoomError: a child ended, or was not ready within ``timeout`` seconds; with its last lines of output.
    """
    from loom_proxy.session.open import connect

    cluster = LocalCluster(hosts, port=port, token=token, env=env, timeout=timeout)
    cluster.start()
    try:
        job = connect(cluster.url, cluster.token)
    except BaseException:
        cluster.close()
        raise
    job._on_close.callback(cluster.close)
    job._connection.gone = cluster.gone
    return job


class LocalCluster:
    """Workers and a gateway as child processes; a context manager with the arguments of `local`.

    ``gateway_options`` are more command-line options for the gateway, such as ``["--session-linger", "60"]``.
    """

    url: str  # at which the gateway listens, ``ws://127.0.0.1:…``
    token: str  # that clients must show to the gateway
    workers: list[str]  # addresses of the workers

    def __init__(
        self,
        hosts: int = 1,
        *,
        port: int = 0,
        token: str | None = None,
        env: Mapping[str, str] | None = None,
        gateway_options: Sequence[str] = (),
        timeout: float = 60.0,
    ) -> None:
        if hosts < 1:
            raise ValueError(f"a cluster needs at least one host, not {hosts}")
        self._hosts = hosts
        self._port = port
        self._timeout = timeout
        self._gateway_options = list(gateway_options)
        self._worker_environment = {**os.environ, **(env or {})}
        # The workers run users' code, which must not see the token. A token in this process's environment belongs
        # to another gateway.
        self._worker_environment.pop("LOOM_TOKEN", None)
        self._token = token
        self._gateway_environment = self._worker_environment | ({"LOOM_TOKEN": token} if token else {})
        self._children: list[Child] = []
        self._owner = os.getpid()  # the process that started the children; a forked copy must not end them

    def start(self) -> None:
        """Start all children at once and wait until the last one is ready."""
        require(GATEWAY_MODULES, "a local cluster")
        atexit.register(self.close)
        try:
            for attempts_left in reversed(range(ATTEMPTS)):
                self._start_children()
                try:
                    self._await_ready()
                    break
                except PortInUse:
                    gateway = self._children[0].ready
                    if not attempts_left or (gateway.done() and gateway.exception()):
                        raise
                # Another program took a port between its choice and the worker's start.
                self._end_children()
        except BaseException:
            self.close()
            raise
        announcement = self._children[0].ready.result()
        self.url = announcement["url"]
        self.token = self._token or announcement["token"]

    def _start_children(self) -> None:
        self.workers = [f"tcp://127.0.0.1:{port}" for port in free_ports(self._hosts)]
        arguments = ["--host", "127.0.0.1", "--port", str(self._port), *self._gateway_options]
        arguments += ["--alert-network", "127.0.0.0/8", "--alert-network", "::1/128"]  # this machine is its user's
        for address in self.workers:
            arguments += ["--worker", address]
        # The gateway first: its warm driver takes longest.
        command = python("loom_gateway", *arguments, "--exit-with-parent")
        self._children = [Child("the gateway", command, self._gateway_environment)]
        for address in self.workers:
            command = python("loom_gateway.workers.host", "--address", address, "--exit-with-parent")
            self._children.append(Child(f"the worker at {address}", command, self._worker_environment))

    def _await_ready(self) -> None:
        ready = [child.ready for child in self._children]
        _, pending = concurrent.futures.wait(ready, self._timeout, concurrent.futures.FIRST_EXCEPTION)
        for one in ready:
            if one not in pending:
                one.result()
        if pending:
            late = [child for child in self._children if child.ready in pending]
            output = "\n".join(child.output for child in late)
            names = " and ".join(child.name for child in late)
            raise LoomError(f"{names} not ready within {self._timeout:g} s; last output:\n{output}")

    @property
    def pids(self) -> list[int]:
        """Process ids of the children: the gateway, then the workers."""
        return [child.pid for child in self._children]

    def wait(self) -> None:
        """Wait until a child ends, which is always a failure, and raise the error with its last lines of output."""
        concurrent.futures.wait([child.ended for child in self._children], None, concurrent.futures.FIRST_COMPLETED)
        raise LoomError(str(self.ended()))

    def ended(self) -> str | None:
        """Return which child has ended, with its last lines of output; None while all run."""
        for child in self._children:
            if child.ended.done():
                return f"{child.name} ended (exit code {child.ended.result()}); last output:\n{child.output}"
        return None

    def gone(self) -> str | None:
        """Return why no client can connect to the cluster any more; None while the gateway runs."""
        gateway = next(iter(self._children), None)
        if gateway is None:
            return "the cluster was closed"
        return f"{gateway.name} ended (exit code {gateway.ended.result()})" if gateway.ended.done() else None

    def close(self) -> None:
        """End the gateway, then the workers with everything that runs on them. A second call does nothing."""
        if os.getpid() != self._owner:
            return  # this is a forked copy of the process that started the children
        self._end_children()
        atexit.unregister(self.close)

    def _end_children(self) -> None:
        gateway, workers = self._children[:1], self._children[1:]
        for group, grace in ((gateway, GATEWAY_GRACE), (workers, WORKER_GRACE)):
            for child in group:
                child.ask_to_end()
            for child in group:
                child.end(grace)
        self._children = []

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
