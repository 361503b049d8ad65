"""`ForwardedPort`: a port of this machine that a program forwards, which is started again whenever it ends."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from loom.errors import LoomError, Unavailable
from loom.mutual_auth.over_http import note_forwarded
from loom.process.backoff import Backoff
from loom.process.child import Child
from loom.process.threads import keep_going

logger = logging.getLogger(__name__)

START_TIMEOUT = 30.0  # seconds that the first program has until it forwards
END_TIMEOUT = 5.0  # seconds that a program has to end
RENEW_AFTER = 10.0  # seconds that a new program is left alone, even if the gateway does not answer through it
BACKOFF = Backoff(0.2, 5.0)  # seconds between restarts of a program that does not forward

# A shell script that runs a command until it ends, or until standard input closes because this process ended. ssh
# makes its standard input non-blocking, on some systems for everybody who shares it.
_UNTIL_STDIN_CLOSES = """
exec 3<&0
"$@" <&3 3<&- &
child=$!
{
    until cat </dev/fd/3; do sleep 1; done
    kill "$child"; sleep 1; kill -0 $$ && kill -9 "$child"
} >/dev/null 2>&1 &
wait "$child"
"""


class ForwardedPort(ABC):
    """A port of this machine that leads to a gateway, as long as this process lives or until `close`.

    Args:
        name: the gateway's address as it was given.
        program: what forwards the port, for messages, such as ``kubectl port-forward to svc/loom``.
        path: the gateway's path, if a proxy such as nginx has the port.

    Raises:
        PortForwardFailed: the program ends before it forwards, or takes too long; with what it said.
    """

    token: str | None = None

    def __init__(self, name: str, program: str, path: str = "") -> None:
        self.name = name
        self.port = 0  # of 127.0.0.1, which the first program chooses
        self.starts = 0  # the number of times that the program was started
        self._program = program
        self._path = path
        self._closing = threading.Event()
        self._over: LoomError | None = None  # why there is no way any more
        self._lock = threading.Lock()
        """Held while the program is started or forwarding is stopped, so that none starts afterwards."""
        self._child = self._start()
        self._await_first()
        keeping = f"keep {program}", self._keep
        self._thread = threading.Thread(target=keep_going, args=keeping, name=f"forward {name}", daemon=True)
        self._thread.start()

    @abstractmethod
    def _command(self, port: int) -> Sequence[str]:
        """Return the command that forwards a port, 0: a free one, to where the gateway is now.

        Its standard input stays open, and empty, as long as the command may run.

        Raises:
            LoomError: the gateway is nowhere now.
        """

    @abstractmethod
    def _port_in(self, line: str) -> int | None:
        """Return the port that a line of the program's output reports as forwarded; None for another line."""

    @abstractmethod
    def _hear(self, line: str) -> bool:
        """Take another line of the program's output. Return whether it says that the program is of no use now."""

    def _tidy(self) -> None:  # noqa: B027 - few programs leave something
        """Take back what an ended program has left."""

    @property
    def url(self) -> str:
        """The gateway's URL by way of the forwarded port."""
        return f"ws://127.0.0.1:{self.port}{self._path}"

    def why_not(self) -> LoomError | None:
        """Return why the gateway does not answer, if that is known."""
        return None

    def gone(self) -> str | None:
        """Return why there will be no gateway any more, if that is known by now."""
        return None

    def renew(self) -> None:
        """Restart the program, unless it is new, because the gateway does not answer through it.

        Raises:
            LoomError: the error for which forwarding was stopped.
        """
        if self._over is not None:
            raise self._over
        # After a dead link a program waits for its connection, whose packets TCP repeats at ever longer intervals.
        patience = RENEW_AFTER if self._child.ready.done() else START_TIMEOUT
        if time.monotonic() - self._started > patience:
            logger.info("nobody answers through %s: it is started again", self._program)
            self._child.cut()

    def close(self, error: LoomError | None = None) -> None:
        """Stop forwarding, for an error if there is one."""
        with self._lock:
            self._over = error
            self._closing.set()
            self._child.cut()
        self._thread.join(END_TIMEOUT)

    def _start(self, port: int = 0) -> Child:
        self._started = time.monotonic()
        command = ["sh", "-c", _UNTIL_STDIN_CLOSES, "sh", *self._command(port)]
        self.starts += 1
        child = Child(self._program, command, understand=self._understand, on_line=self._heard)
        child.ready.add_done_callback(self._note_port)
        return child

    def _understand(self, line: str) -> Mapping[str, Any] | None:
        port = self._port_in(line)
        return None if port is None else {"port": port}

    def _note_port(self, ready: concurrent.futures.Future[Mapping[str, Any]]) -> None:
        if ready.exception() is None:
            self.port = ready.result()["port"]
            note_forwarded(self.port)

    def _heard(self, line: str) -> None:
        if line and self._hear(line):
            self._child.cut()

    def _await_first(self) -> None:
        try:
            self._child.ready.result(START_TIMEOUT)
            self._note_port(self._child.ready)  # the callback may come later
        except (LoomError, concurrent.futures.TimeoutError) as error:
            what = "ended" if isinstance(error, LoomError) else f"did not forward within {START_TIMEOUT:g} s"
            self._child.cut()
            self._child.end(END_TIMEOUT)
            self._tidy()
            said = self._child.output.replace("\n", "; ") or "it said nothing"
            raise Unavailable(f"{self._program} {what}: {said}", code="port_forward_failed") from error
        except BaseException:  # Ctrl-C
            self._child.cut()
            raise

    def _keep(self) -> None:
        waits = iter(BACKOFF)
        while True:
            self._child.ended.result()
            self._child.cut()
            self._tidy()
            if self._child.ready.exception() is None and not self._closing.is_set():
                waits = iter(BACKOFF)
                logger.warning("%s has ended, and is started again", self._program)
            while True:
                if self._closing.wait(next(waits)):
                    return
                with self._lock:
                    if self._closing.is_set():
                        return
                    try:
                        # The same port, unless another program has taken it.
                        worked = self._child.ready.exception() is None
                        self._child = self._start(self.port if worked else 0)
                        break
                    except LoomError as error:
                        logger.info("%s is not started: %s", self._program, error)
