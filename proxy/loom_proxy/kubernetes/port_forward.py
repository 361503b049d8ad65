"""`PortForward`: a ``kubectl port-forward`` that restarts whenever it ends."""

from __future__ import annotations

import concurrent.futures
import logging
import re
import shutil
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from loom.errors import InvalidAddress, LoomError, MissingDependency, Unavailable
from loom.mutual_auth.over_http import note_forwarded
from loom.process.backoff import Backoff
from loom.process.child import Child
from loom.process.threads import keep_going

logger = logging.getLogger(__name__)

GATEWAY_PORT = 8470

START_TIMEOUT = 30.0  # seconds that the first ``kubectl`` has until it forwards
END_TIMEOUT = 5.0  # seconds that a ``kubectl`` has to end
RENEW_AFTER = 10.0  # seconds that a new ``kubectl`` is left alone, even if the gateway does not answer through it
BACKOFF = Backoff(0.2, 5.0)  # seconds between restarts of a ``kubectl`` that does not forward

_FORWARDS = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ")
_NAME = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_ADDRESS = re.compile(
    rf"kube://(?P<namespace>{_NAME})/(?:(?P<kind>[a-z]+)/)?(?P<name>{_NAME})(?::(?P<port>\d+)(?P<path>/[^?#]*)?|/)?"
)

# A shell script that runs a command until it ends, or until standard input closes because this process ended.
_UNTIL_STDIN_CLOSES = """
exec 3<&0
"$@" </dev/null 3<&- &
child=$!
{ cat <&3; kill "$child"; sleep 1; kill -0 $$ && kill -9 "$child"; } >/dev/null 2>&1 &
wait "$child"
"""


class KubeAddress(NamedTuple):
    """The address of a gateway in Kubernetes, to forward a port to."""

    namespace: str
    resource: str  # the resource in kubectl's form, such as ``svc/loom-gateway``
    port: int
    path: str = ""  # the gateway's path, if a proxy such as nginx has the port

    def __str__(self) -> str:
        place = "" if self.port == GATEWAY_PORT and not self.path else f":{self.port}{self.path}"
        return f"kube://{self.namespace}/{self.resource.removeprefix('svc/')}{place}"


def parse_kube_address(url: str) -> KubeAddress:
    """Read ``kube://NAMESPACE/SERVICE[:PORT[/PATH]]``, or ``kube://NAMESPACE/pod/NAME[:PORT[/PATH]]``."""
    match = _ADDRESS.fullmatch(url)
    port = int(match["port"] or GATEWAY_PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise InvalidAddress(
            f"{url!r} is no address in Kubernetes: write kube://NAMESPACE/SERVICE or kube://NAMESPACE/SERVICE:PORT "
            "with the names that `kubectl get services -A` shows"
        )
    path = (match["path"] or "").rstrip("/")
    return KubeAddress(match["namespace"], f"{match['kind'] or 'svc'}/{match['name']}", port, path)


def is_kube_address(url: str) -> bool:
    """Return whether a gateway's URL is an address in Kubernetes, for `parse_kube_address`."""
    return url.startswith("kube://")


def forward_to(url: str) -> PortForward | None:
    """Forward a port to a gateway whose URL is an address in Kubernetes; return None for another URL."""
    return PortForward(parse_kube_address(url)) if is_kube_address(url) else None


class PortForward:
    """A port of this machine that leads to one in Kubernetes, as long as this process lives or until `close`."""

    def __init__(self, address: KubeAddress) -> None:
        self.address = address
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            raise MissingDependency(
                f"{address} needs kubectl, which is not on PATH: install it (kubernetes.io/docs/tasks/tools), or "
                "give the ws:// or wss:// address of an ingress"
            )
        self.port = 0  # of 127.0.0.1, which the first ``kubectl`` chooses
        self._command = ["sh", "-c", _UNTIL_STDIN_CLOSES, "sh", kubectl, "port-forward", "--address", "127.0.0.1"]
        self._command += ["-n", address.namespace, address.resource]
        self.starts = 0  # the number of times that ``kubectl`` was started
        self._closing = threading.Event()
        self._over: LoomError | None = None  # why there is no way any more
        self._lock = threading.Lock()
        """Held while ``kubectl`` is started or forwarding is stopped, so that none starts afterwards."""
        self._kubectl = self._start()
        self._await_first()
        keeping = "keep kubectl port-forward", self._keep
        self._thread = threading.Thread(target=keep_going, args=keeping, name=f"forward {address}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """The gateway's address in Kubernetes."""
        return str(self.address)

    @property
    def url(self) -> str:
        """The gateway's URL by way of the forwarded port."""
        return f"ws://127.0.0.1:{self.port}{self.address.path}"

    def renew(self) -> None:
        """Restart ``kubectl``, unless it is new, because the gateway does not answer through it.

        Raises:
            LoomError: the error for which forwarding was stopped.
        """
        if self._over is not None:
            raise self._over
        # After a dead link kubectl waits for its connection, whose packets TCP repeats at ever longer intervals.
        patience = RENEW_AFTER if self._kubectl.ready.done() else START_TIMEOUT
        if time.monotonic() - self._started > patience:
            logger.info("nobody answers through kubectl port-forward to %s: it is started again", self.address)
            self._kubectl.cut()

    def close(self, error: LoomError | None = None) -> None:
        """Stop forwarding, for an error if there is one."""
        with self._lock:
            self._over = error
            self._closing.set()
            self._kubectl.cut()
        self._thread.join(END_TIMEOUT)

    def _start(self, port: int = 0) -> Child:
        """Start a ``kubectl``, which forwards a port; 0: one of its choice: another program may take a free one."""
        self._started = time.monotonic()
        self.starts += 1
        command = [*self._command, f"{port or ''}:{self.address.port}"]
        child = Child(f"kubectl to {self.address}", command, understand=_forwards, on_line=self._heard)
        child.ready.add_done_callback(self._note_port)
        return child

    def _note_port(self, ready: concurrent.futures.Future[Mapping[str, Any]]) -> None:
        if ready.exception() is None:
            self.port = ready.result()["port"]
            note_forwarded(self.port)

    def _heard(self, line: str) -> None:
        if line and not line.startswith("Handling connection"):
            logger.info("kubectl: %s", line)
            if "lost connection to pod" in line:
                # kubectl goes on listening, but every later connection fails.
                self._kubectl.cut()

    def _await_first(self) -> None:
        try:
            self._kubectl.ready.result(START_TIMEOUT)
            self._note_port(self._kubectl.ready)  # the callback may come later
        except (LoomError, concurrent.futures.TimeoutError) as error:
            what = "ended" if isinstance(error, LoomError) else f"did not forward within {START_TIMEOUT:g} s"
            self._kubectl.cut()
            self._kubectl.end(END_TIMEOUT)
            said = self._kubectl.output.replace("\n", "; ") or "it said nothing"
            raise Unavailable(
                f"kubectl port-forward to {self.address.resource} in namespace {self.address.namespace} "
                f"{what}: {said}",
                code="port_forward_failed",
            ) from error
        except BaseException:  # Ctrl-C
            self._kubectl.cut()
            raise

    def _keep(self) -> None:
        waits = iter(BACKOFF)
        while True:
            self._kubectl.ended.result()
            if self._kubectl.ready.exception() is None and not self._closing.is_set():
                waits = iter(BACKOFF)
                logger.warning("kubectl port-forward to %s has ended, and is started again", self.address)
            if self._closing.wait(next(waits)):
                return
            with self._lock:
                if not self._closing.is_set():
                    # The same port, unless another program has taken it.
                    worked = self._kubectl.ready.exception() is None
                    self._kubectl = self._start(self.port if worked else 0)


def _forwards(line: str) -> Mapping[str, Any] | None:
    match = _FORWARDS.match(line)
    return {"port": int(match[1])} if match else None
