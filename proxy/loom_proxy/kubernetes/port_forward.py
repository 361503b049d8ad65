"""`PortForward`: a ``kubectl port-forward`` that is started again whenever it ends."""

from __future__ import annotations

import atexit
import collections
import contextlib
import io
import logging
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import weakref
from typing import IO, NamedTuple

from loom.errors import InvalidAddress, MissingDependency, Unavailable

__all__ = ["KubeAddress", "PortForward", "parse_kube_address"]

logger = logging.getLogger(__name__)

GATEWAY_PORT = 8470

START_TIMEOUT = 30.0
"""Seconds that the first ``kubectl`` has until it forwards."""

RENEW_AFTER = 10.0
"""Seconds for which a ``kubectl`` that forwards is left alone, though nobody answers through it."""

FIRST_WAIT, LONGEST_WAIT = 0.2, 5.0
"""Seconds before it is started again; doubled each time, until it forwards."""

_NAME = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_ADDRESS = re.compile(
    rf"kube://(?P<namespace>{_NAME})/(?:(?P<kind>[a-z]+)/)?(?P<name>{_NAME})(?::(?P<port>\d+)(?P<path>/[^?#]*)?|/)?"
)

_forwards: weakref.WeakSet[PortForward] = weakref.WeakSet()

_UNTIL_STDIN_CLOSES = """
exec 3<&0
"$@" </dev/null 3<&- &
child=$!
{ cat <&3; kill "$child"; sleep 1; kill -0 $$ && kill -9 "$child"; } >/dev/null 2>&1 &
wait "$child"
"""
"""Runs a command until it ends or standard input, whose other end this process holds, is closed."""


class KubeAddress(NamedTuple):
    """What to forward a port to."""

    namespace: str
    resource: str
    """As kubectl names it, such as ``svc/loom-gateway``."""
    port: int
    path: str = ""
    """Of the gateway there, where something else has the port that leads to it."""

    def __str__(self) -> str:
        return f"kube://{self.namespace}/{self.resource.removeprefix('svc/')}:{self.port}{self.path}"


def parse_kube_address(url: str) -> KubeAddress:
    """Read ``kube://NAMESPACE/SERVICE[:PORT[/PATH]]``, or ``kube://NAMESPACE/pod/NAME[:PORT[/PATH]]``.

    Raises:
        InvalidAddress: the text has another form.
    """
    match = _ADDRESS.fullmatch(url)
    port = int(match["port"] or GATEWAY_PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise InvalidAddress(
            f"{url!r} is no address in Kubernetes: write kube://NAMESPACE/SERVICE or kube://NAMESPACE/SERVICE:PORT "
            "with the names that `kubectl get services -A` shows"
        )
    path = (match["path"] or "").rstrip("/")
    return KubeAddress(match["namespace"], f"{match['kind'] or 'svc'}/{match['name']}", port, path)


class PortForward:
    """A port of this machine that leads to one in Kubernetes, for as long as this process lives or until `close`.

    Args:
        address: where it leads.

    Raises:
        MissingDependency: there is no ``kubectl``.
        PortForwardFailed: it ends instead of forwarding; the text has what it said.
    """

    def __init__(self, address: KubeAddress) -> None:
        self.address = address
        self._kubectl = shutil.which("kubectl")
        if self._kubectl is None:
            raise MissingDependency(
                f"{address} needs kubectl, which is not on PATH: install it (kubernetes.io/docs/tasks/tools), or "
                "give the ws:// or wss:// address of an ingress"
            )
        self.port = _free_port()
        """Of 127.0.0.1. It stays the same."""
        self.starts = 0
        self._said: collections.deque[str] = collections.deque(maxlen=5)
        self._closing = threading.Event()
        self._forwarding = threading.Event()
        self._lifeline: io.FileIO | None = None
        self._started = time.monotonic()
        self._lock = threading.Lock()
        _forwards.add(self)
        self._thread = threading.Thread(target=self._keep, name=f"forward {address}", daemon=True)
        self._thread.start()
        self._await_first()

    @property
    def url(self) -> str:
        """The forwarded port, as a gateway's address."""
        return f"ws://127.0.0.1:{self.port}{self.address.path}"

    def renew(self) -> None:
        """Start ``kubectl`` again, unless it is new: nobody answers through it.

        After a dead link it waits for its own connection, whose packets are sent again at ever longer intervals.
        """
        patience = RENEW_AFTER if self._forwarding.is_set() else START_TIMEOUT
        if time.monotonic() - self._started > patience:
            logger.info("nobody answers through kubectl port-forward to %s: it is started again", self.address)
            self._end_kubectl()

    def close(self) -> None:
        """End it."""
        self._closing.set()
        self._end_kubectl()
        self._thread.join(5.0)

    def _await_first(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while not self._forwarding.wait(0.05):
            ended = self.starts > 1
            if ended or time.monotonic() > deadline:
                self.close()
                said = "; ".join(self._said) or "it said nothing"
                what = "ended" if ended else f"did not forward within {START_TIMEOUT:g} s"
                raise Unavailable(
                    f"kubectl port-forward to {self.address.resource} in namespace {self.address.namespace} "
                    f"{what}: {said}",
                    code="port_forward_failed",
                )

    # -- on its thread ------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        wait = FIRST_WAIT
        while not self._closing.is_set():
            self._forwarding.clear()
            self._run()
            if self._forwarding.is_set() and not self._closing.is_set():
                wait = FIRST_WAIT
                logger.warning("kubectl port-forward to %s has ended, and is started again", self.address)
            if self._closing.wait(wait):
                return
            wait = min(2 * wait, LONGEST_WAIT)

    def _run(self) -> None:
        address = self.address
        assert self._kubectl is not None
        command = [self._kubectl, "port-forward", "--address", "127.0.0.1", "-n", address.namespace]
        command += [address.resource, f"{self.port}:{address.port}"]
        theirs, ours = os.pipe()
        try:
            with self._lock:
                if self._closing.is_set():
                    os.close(ours)
                    return
                self._lifeline = io.FileIO(ours, "wb")
            process = subprocess.Popen(
                ["sh", "-c", _UNTIL_STDIN_CLOSES, "sh", *command],
                stdin=theirs,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the program, not for its connection
            )
        finally:
            os.close(theirs)
        self._started = time.monotonic()
        self.starts += 1
        assert process.stdout is not None
        with process.stdout:
            self._read(process.stdout)
        process.wait()
        self._end_kubectl()

    def _read(self, output: IO[bytes]) -> None:
        for raw in output:
            line = raw.decode(errors="replace").strip()
            if line.startswith("Forwarding from"):
                self._forwarding.set()
            elif line and not line.startswith("Handling connection"):
                self._said.append(line)
                logger.info("kubectl: %s", line)
                if "lost connection to pod" in line:
                    # kubectl goes on to listen, and every connection fails from then on.
                    self._end_kubectl()

    def _end_kubectl(self) -> None:
        with self._lock:
            lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            lifeline.close()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@atexit.register
def _close_all() -> None:
    for forward in list(_forwards):
        with contextlib.suppress(OSError):
            forward.close()


def _release_lifelines() -> None:
    """In a forked copy of this process: the forwards are to end with the original, not with the copy."""
    for forward in list(_forwards):
        if forward._lifeline is not None:
            forward._lifeline.close()


os.register_at_fork(after_in_child=_release_lifelines)
