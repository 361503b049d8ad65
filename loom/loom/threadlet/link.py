"""A threadlet's end of the link to the weaver: one thread that nothing in the training process can hold up.

The thread connects, and reconnects whenever a connection is over, for as long as the process lives. It sends frames
and receives commands. It never converts a value or queries a device, which may hang with a GPU: heartbeats have to
go on then, so that the weaver sees a stalled process and not a dead one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import socket
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from loom.control.address import WeaverAddress, parse_weaver_address
from loom.control.commands import (
    Acknowledged,
    Acknowledgement,
    AppliedByOthers,
    Command,
    UnknownCommandKind,
)
from loom.control.frame import MAX_FRAME, Frame, pack, unpack_all
from loom.control.handshake import (
    COMES_BACK_WITHIN,
    EVERYTHING_OFFERED,
    TAKEN_ADVICE,
    Bye,
    CohortPlace,
    GoodbyeStored,
    Leaving,
    Offers,
    Refusal,
    ThreadletHello,
    ThreadletWelcome,
    TrainingEnding,
)
from loom.control.profiles import ProfileRequest
from loom.control.reports import (
    AccountPause,
    DeviceFailed,
    DeviceReport,
    Draining,
    FailureNoted,
    Heartbeat,
    PeerFailures,
    Phase,
    Registration,
    Row,
    Stack,
    StackRequest,
    StatusReports,
    Stored,
    TimeAccount,
)
from loom.devices import DeviceFailure
from loom.errors import LoomError, ProtocolMismatch
from loom.process.backoff import Backoff
from loom.process.listen import notice_loss
from loom.threadlet.cohort_member import CohortMember
from loom.threadlet.exit_code import tell_at_exit
from loom.threadlet.inbox import CommandInbox
from loom.threadlet.profiling import Profiler
from loom.threadlet.status_rows import KeptReports, now_of_system
from loom.wire.length_prefix import FrameSplitter

SILENCE = 30.0  # seconds after which a peer that acknowledges no bytes counts as lost

_CHUNK = 1 << 16


class ConnectionOver(Exception):
    """The connection is over."""


class ThreadletConnection:
    """A connection over one socket, for one thread. Only `exchange` waits; a byte from ``wake`` ends the wait."""

    def __init__(self, sock: socket.socket, wake: socket.socket) -> None:
        notice_loss(sock, SILENCE)
        sock.setblocking(False)
        self._socket = sock
        self._wake = wake
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake, selectors.EVENT_READ)
        self._selector.register(sock, selectors.EVENT_READ)
        self._splitter = FrameSplitter(MAX_FRAME)
        self._out = bytearray()
        self._watched = selectors.EVENT_READ

    @property
    def waiting(self) -> int:
        """Bytes that the socket has not taken yet."""
        return len(self._out)

    def put(self, frame: Frame) -> None:
        """Queue a frame, unless it cannot be packed, which is logged."""
        try:
            self._out += pack(frame.to_body())
        except (LoomError, TypeError, ValueError, OverflowError, RecursionError) as error:
            _log.error("a %r frame for the weaver is left out: %s", frame.KIND, error)

    def put_rows(self, rows: list[Row]) -> None:
        """Queue rows, in as many frames as their size needs.

        A row that cannot be packed would come again on each connection, so it goes without its values.
        """
        try:
            self._out += pack(StatusReports(rows).to_body())
        except Exception as error:  # noqa: BLE001 - also whatever a stranger's value raises
            if len(rows) > 1:
                self.put_rows(rows[: len(rows) // 2])
                self.put_rows(rows[len(rows) // 2 :])
            else:
                seq, moment, *counts = rows[0][:5]
                _log.error("a status report is sent without metrics and configuration: %s", error)
                self._out += pack(StatusReports([[seq, moment, *counts, {}, None]]).to_body())

    def close(self) -> None:
        """Close the socket. In a forked child nothing is sent, because the parent holds the socket too."""
        self._selector.close()
        _close(self._socket)

    def end_sending(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def tell_exit_code(self) -> None:
        """Leave it to the end of this process to send its exit code, after `close`."""
        tell_at_exit(self._socket)

    def exchange(self, timeout: float) -> list[list[Any]]:
        """Send as much as the socket takes, then wait for an event; return the frames that came."""
        self._send()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        if wanted != self._watched:
            self._selector.modify(self._socket, wanted)
            self._watched = wanted
        frames: list[list[Any]] = []
        for key, events in self._selector.select(timeout):
            if key.fileobj is self._wake:
                _empty(self._wake)
            elif events & selectors.EVENT_READ:
                frames += self._receive()
        self._send()
        return frames

    def _send(self) -> None:
        while self._out:
            try:
                sent = self._socket.send(self._out[:_CHUNK])
            except (BlockingIOError, InterruptedError):
                return
            del self._out[:sent]

    def _receive(self) -> list[list[Any]]:
        try:
            data = self._socket.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            raise ConnectionOver("it closed the connection")
        return unpack_all(self._splitter.feed(data))


def _empty(wake: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError, InterruptedError):
        while wake.recv(4096):
            pass


_log = logging.getLogger("loom")

CONNECT_TIMEOUT = 5.0  # seconds that an attempt to connect may take
BACKOFF = Backoff(first=0.1, most=5.0, jitter=0.5)  # waits before further attempts to connect
WELCOME_TIMEOUT = 10.0  # seconds within which the weaver has to answer a hello
ROWS = 512  # status reports in one frame
HIGH_WATER = 1 << 18  # bytes waiting for the socket above which only answers are added
SHOWN_BY_REPORT = 1.5
"""Intervals of heartbeats from a status report with a step, which shows the same, to the next heartbeat."""
MOST_PATIENCE = 300.0
"""Seconds that the patience with a weaver that stores nothing grows to: its disk may be full."""

ASK_AFTER = 5.0  # seconds without a weaver after which a gateway is asked for its address
ASK_EVERY = 10.0  # seconds between two such questions, at least
GOODBYE_TIMEOUT = 0.4  # seconds that the weaver has to read the last frame and close the connection
STORED_WITHIN = 1.0  # seconds in which a weaver that answers goodbyes stores one
LOST_LATELY = 30.0
"""Seconds after a connection is lost in which a process that ends waits for the weaver to come back."""
RETRY_AT_END = 0.1  # seconds between its attempts


class _Refused(Exception):
    def __init__(self, refusal: Refusal) -> None:
        self.code, self.text = refusal.code, _for_this_user(refusal.text)
        super().__init__(f"{self.text} ({self.code})")


def _for_this_user(text: str) -> str:
    """Return a refusal's text, with another advice under ``loom run``, which has chosen the replica's id."""
    name = os.environ.get("LOOM_RUN")
    if not name or f"the replica '{name}_" not in text:
        return text
    return text.replace(TAKEN_ADVICE, "choose another name, with `loom run --name` or LOOM_RUN, or stop it")


class WeaverLink:
    """The connection of this process with the weaver, in a thread of its own.

    ``find`` returns the weaver's address if it is None, or another one later; None: it stays as it is.
    ``hello`` returns the first frame of each connection from the key, ``beat`` a heartbeat's step and phase;
    ``peers`` takes failures of peers; ``cohort`` looks for the process group, and is None if it is not to;
    ``offers`` returns what the process refuses; ``tell_start`` begins to gather the facts of the start and to send
    them.
    """

    def __init__(
        self,
        address: WeaverAddress | None,
        find: Callable[[], str] | None,
        inbox: CommandInbox,
        reports: KeptReports,
        hello: Callable[[str], ThreadletHello],
        beat: Callable[[], tuple[int | None, Phase]],
        account: Callable[[], TimeAccount],
        peers: Callable[[PeerFailures], None],
        cohort: CohortMember | None = None,
        offers: Callable[[], Offers] = lambda: EVERYTHING_OFFERED,
        tell_start: Callable[[], object] = lambda: None,
    ) -> None:
        self._address = address
        self._find = find
        self._ask_at = 0.0  # when `find` is called, on the monotonic clock, unless the weaver is there
        self._inbox = inbox
        self._reports = reports
        self._hello = hello
        self._beat = beat
        self._account = account
        self._peers = peers
        self._cohort = cohort
        if cohort is not None:
            cohort.changed = self.beat_now
        self._offers = offers
        self._tell_start = tell_start
        self._offered = EVERYTHING_OFFERED  # the ones that the connected weaver knows
        self._place: CohortPlace | None = None  # the place in a cohort that the connected weaver knows
        self.takes_cohorts = False
        """True if the weaver that is or was connected sends commands to cohorts."""
        self._profiler = Profiler(self.send)
        self._frames: deque[Frame] = deque()  # to send; a signal handler may append while this thread does
        self._open = False  # whether frames can be queued for a connection
        self.connected = False  # whether the weaver has welcomed this process and the connection stands
        self.welcomed = threading.Event()  # set by the first welcome
        self.taken = ""  # the weaver's words on another process that was this replica, at the last attempt
        self._takes_health = False  # whether the connected weaver takes the health of devices
        self._devices: DeviceReport | None = None  # the newest report on the devices that was not sent
        self._account_pause = 0.0  # the seconds between two accounts of time, at least
        # When the next heartbeat, the next account, and a look for what else has changed are due.
        self._beat_at = self._account_at = self._look_at = 0.0
        self._told: Phase | None = None  # the phase that the connected weaver knows
        self._failures: dict[
            str, DeviceFailed
        ] = {}  # the failures of devices that no weaver has noted, by their ids
        self._goodbye: Bye | Leaving = Bye("", TrainingEnding.FINISHED)
        self._deadline = 0.0  # when `close` gives up, on the monotonic clock
        self._closing = threading.Event()
        self._closed = math.inf  # when `close` was called
        self._lost = -math.inf  # when the last connection was lost
        self._confirms = False  # whether the weaver that is or was connected tells that a goodbye is stored
        self._said = False  # whether the goodbye is stored, or nothing more can be done for it
        self._beat_due = False  # before its time
        self._asked: float | None = None  # the time of sending reports, none of which is stored since
        self._patience = SILENCE  # seconds for which reports may be sent and none be stored
        self._flushes: deque[threading.Event] = deque()  # events to set when no frame waits to be sent
        self._logged: set[str] = set()  # the problems logged since the last welcome; each is logged once
        self._connection: ThreadletConnection | None = None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="loom-threadlet", daemon=True)

    def start(self) -> None:
        if self._address is not None:
            self._ask_at = time.monotonic() + ASK_AFTER
        self._thread.start()

    def send(self, frame: Frame) -> None:
        """Send a frame soon. If the connection breaks it is lost: hello or a repeated request makes up for it."""
        if self._open:
            self._frames.append(frame)
            self.wake()

    def report_devices(self, report: DeviceReport) -> None:
        """Send a report on the devices with the next heartbeat or status report, or a newer one in its place."""
        self._devices = report if self._takes_health else report.numbers()

    def report_failure(self, failure: DeviceFailure) -> None:
        """Report the failure of a device at once, and on each further connection until the weaver has noted it."""
        frame = DeviceFailed(uuid.uuid4().hex, failure.device, failure.reason)
        self._failures[frame.id] = frame
        if self._takes_health:
            self.send(frame)

    def beat_now(self) -> None:
        self._beat_due = True
        self.wake()

    def wake(self) -> None:
        """Wake the thread, so that it sends queued frames."""
        # A full socket wakes the thread anyway; a closed one means that the thread has ended.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_sender.send(b"\0")

    def flush(self, timeout: float) -> None:
        """Wait until the kernel has all queued frames, or for ``timeout`` seconds."""
        if self._open:
            sent = threading.Event()
            self._flushes.append(sent)
            self.wake()
            sent.wait(timeout)

    def close(self, goodbye: Bye | Leaving, timeout: float) -> None:
        """Send the remaining frames, say goodbye and end the thread.

        If the weaver is lost just then, or was so lately, wait for it to come back, `COMES_BACK_WITHIN` at most.
        """
        self._goodbye = goodbye
        self._deadline = now = time.monotonic()
        self._deadline += timeout
        self._closed = now
        self._closing.set()
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout + 2 * GOODBYE_TIMEOUT)
            self._thread.join(max(0.0, self._gives_up_at - time.monotonic()))

    def abandon(self) -> None:
        """Release the parent's sockets, in a forked child, without sending anything or shutting them down."""
        for held in (self._connection, self._wake_receiver, self._wake_sender):
            if held is not None:
                held.close()

    def _run(self) -> None:
        waits = iter(BACKOFF)
        # Try at least once, for a process that reports something and ends at once.
        while True:
            wait, taken = None, ""
            try:
                self._connect_and_serve()
            except _Refused as refusal:
                # The current process of the replica may hang, and be about to be killed.
                taken = refusal.text if refusal.code == "replica_taken" else ""
                wait = None if taken else BACKOFF.most
                self._said = self._closing.is_set()
                self._log_once(str(refusal), logging.ERROR, "the weaver refuses this process: %s", refusal)
            except ProtocolMismatch as error:
                wait = BACKOFF.most
                self._log_once("protocol", logging.ERROR, "what answers at the weaver's address is none: %s", error)
            except (OSError, ConnectionOver) as error:
                kind = type(error).__name__
                self._log_once(kind, logging.WARNING, "no weaver: %s; training goes on, and so do attempts", error)
            except Exception:  # noqa: BLE001 - logged; no error may end this thread or reach the training
                self._log_once("fault", logging.ERROR, "the link to the weaver broke of itself", exc_info=True)
            finally:
                if self.connected:
                    waits = iter(BACKOFF)
                    self._lost = time.monotonic()
                    self._ask_at = time.monotonic() + ASK_AFTER
                self._open, self.taken = False, taken
                self.connected = self._takes_health = False
                self._frames.clear()
                connection, self._connection = self._connection, None
                if connection is not None:
                    connection.close()
            if self._closing.wait(wait or next(waits)) and not self._comes_back():
                break
        _close(self._wake_receiver)
        _close(self._wake_sender)

    @property
    def _gives_up_at(self) -> float:
        """When a process that ends gives up a weaver that it has lost lately; 0 if it has not."""
        lately = self._confirms and self._lost > self._closed - LOST_LATELY
        return self._closed + COMES_BACK_WITHIN if lately else 0.0

    def _comes_back(self) -> bool:
        """Return, after a moment, whether a process that ends tries once more to say goodbye."""
        if self._said or time.monotonic() > self._gives_up_at:
            return False
        time.sleep(RETRY_AT_END)
        return True

    def _log_once(self, kind: str, level: int, text: str, *arguments: Any, exc_info: bool = False) -> None:
        if kind not in self._logged and not self._closing.is_set():
            self._logged.add(kind)
            _log.log(level, text, *arguments, exc_info=exc_info)

    def _find_address(self) -> WeaverAddress:
        """Return the weaver's address. Ask for it if there is none, and when nobody has been there for a while."""
        if self._find is not None and time.monotonic() >= self._ask_at:
            try:
                self._address = parse_weaver_address(self._find())
            except Exception as error:  # noqa: BLE001 - also what a keyring, or a user without a home, makes of it
                if self._address is None:
                    raise ConnectionOver(str(error)) from None
            self._ask_at = time.monotonic() + ASK_EVERY
        assert self._address is not None
        return self._address

    def _connect_and_serve(self) -> None:
        address = self._find_address()
        sock = socket.create_connection((address.host, address.port), CONNECT_TIMEOUT)
        self._connection = connection = ThreadletConnection(sock, self._wake_receiver)
        # Queue frames from here on, so that a change made after the hello is built is sent after it.
        self._frames.clear()
        self._devices = None
        self._open = True
        if self._cohort is not None:
            self._cohort.look(wait=True)
        hello = self._hello(address.key)
        self._place, self._offered = hello.cohort, hello.offers
        connection.put(hello)
        welcome, rest = self._welcome(connection)
        self._reports.resume(welcome.seq)
        self._asked = None
        if self._logged:
            self._logged.clear()
            _log.info("the weaver is there")
        self.connected, self._takes_health = True, welcome.health
        if self._closing.is_set():
            self._deadline = max(self._deadline, time.monotonic() + GOODBYE_TIMEOUT)
        self.takes_cohorts, self._confirms = welcome.cohorts, welcome.goodbyes
        self.welcomed.set()
        if welcome.start:
            self._tell_start()
        if welcome.health:
            self._frames.extend(self._failures.copy().values())
        for frame in rest:
            self._take(frame)
        self._serve(connection, welcome)

    def _welcome(self, connection: ThreadletConnection) -> tuple[ThreadletWelcome, list[list[Any]]]:
        """Return the weaver's answer to the hello, and the frames that came after it."""
        deadline = time.monotonic() + WELCOME_TIMEOUT
        while (left := deadline - time.monotonic()) > 0:
            if self._closing.is_set() and time.monotonic() > max(self._deadline, self._gives_up_at):
                raise ConnectionOver("this process ends")
            frames = connection.exchange(min(left, 0.5 if self._closing.is_set() else left))
            if not frames:
                continue
            first, *rest = frames
            if first[0] == Refusal.KIND:
                raise _Refused(Refusal.from_body(first))
            if first[0] != ThreadletWelcome.KIND:
                raise ProtocolMismatch(f"it answered hello with {first!r:.80}")
            return ThreadletWelcome.from_body(first), rest
        raise ConnectionOver(f"it did not answer within {WELCOME_TIMEOUT:g} s")

    def _serve(self, connection: ThreadletConnection, welcome: ThreadletWelcome) -> None:
        self._look_at = self._beat_at = self._account_at = time.monotonic()
        self._account_pause, self._told = 0.0, None
        while True:
            now = time.monotonic()
            while self._frames:
                self._put(connection, self._frames.popleft(), welcome)
            more = self._tell(connection, welcome, now)
            unheard = self._reports.unsent if welcome.goodbyes else len(self._reports)
            if self._closing.is_set() and (now >= self._deadline or not (self._frames or unheard)):
                self._say_goodbye(connection, welcome)
                return
            until = min(self._look_at, self._beat_at)
            if self._closing.is_set():
                until = min(until, self._deadline)
            idle = not more or connection.waiting >= HIGH_WATER  # else only poll: further rows can be sent now
            for frame in connection.exchange(max(0.0, until - time.monotonic()) if idle else 0.0):
                self._take(frame)
            self._check_answers()
            while self._flushes and not (self._frames or connection.waiting):
                self._flushes.popleft().set()

    def _tell(self, connection: ThreadletConnection, welcome: ThreadletWelcome, now: float) -> bool:
        """Send reports and a heartbeat, as far as they are due, and what goes with them; return if reports were."""
        has_room = connection.waiting < HIGH_WATER  # the weaver would read more only after what it leaves unread
        rows = self._reports.next_rows(ROWS) if has_room else []
        if rows:
            connection.put_rows(rows if welcome.status_types else [row[:7] for row in rows])
            self._asked = self._asked or now
            if rows[-1][2] is not None:
                self._beat_at = now + SHOWN_BY_REPORT * welcome.beat
        beats = now >= self._beat_at or self._beat_due
        if now >= self._look_at or self._beat_due:
            self._beat_due = False
            self._look_at = now + welcome.beat
            self._look(connection, welcome)
            beats = beats or self._beat()[1] is not self._told
        if beats:
            self._beat_at = max(self._beat_at, now + welcome.beat)
        if beats and has_room:
            step, self._told = self._beat()
            connection.put(Heartbeat(now_of_system(), step, self._told))
        if has_room and (beats or rows):
            if self._devices is not None:
                connection.put(self._devices)
                self._devices = None
            if welcome.spent and now >= self._account_at:
                self._account_at = now + max(self._account_pause, welcome.beat)
                connection.put(self._account())
        return bool(rows)

    def _look(self, connection: ThreadletConnection, welcome: ThreadletWelcome) -> None:
        """Tell of a change of the process's place in a cohort, and of what it refuses."""
        if self._cohort is not None:
            self._cohort.look()
            if welcome.cohorts and self._place != self._cohort.place:
                self._place = self._cohort.place
                connection.put(self._place or CohortPlace("", 0, 0))
        if welcome.offers and (offers := self._offers()) != self._offered:
            self._offered = offers
            connection.put(offers)

    def _check_answers(self) -> None:
        """Raise `ConnectionOver` if reports leave and no answer comes: something on the way may lose bytes."""
        if self._asked is not None and (waited := time.monotonic() - self._asked) > self._patience:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
            raise ConnectionOver(f"it has stored no report for {waited:.0f} s")

    def _put(self, connection: ThreadletConnection, frame: Frame, welcome: ThreadletWelcome) -> None:
        if isinstance(frame, Registration | Draining) and not welcome.changes:
            text = "the weaver is older than this process: it hears of %r when it is connected to again"
            self._log_once(frame.KIND, logging.WARNING, text, frame.KIND)
        else:
            connection.put(frame)

    def _take(self, frame: list[Any]) -> None:
        match frame[0]:
            case Stored.KIND:
                self._reports.stored(Stored.from_body(frame).seq)
                self._asked = time.monotonic() if self._reports.unanswered else None
                self._patience = SILENCE
            case Command.KIND:
                self._take_command(frame)
            case AppliedByOthers.KIND if self._cohort is not None:
                self._cohort.hear(AppliedByOthers.from_body(frame).id)
            case AccountPause.KIND:
                self._account_pause = AccountPause.from_body(frame).seconds
            case PeerFailures.KIND:
                self._peers(PeerFailures.from_body(frame))
            case FailureNoted.KIND:
                self._failures.pop(FailureNoted.from_body(frame).id, None)
            case StackRequest.KIND:
                self._frames.append(Stack(StackRequest.from_body(frame).id, format_stacks()))
            case ProfileRequest.KIND:
                self._profiler.begin(ProfileRequest.from_body(frame))
            case Refusal.KIND:
                raise _Refused(Refusal.from_body(frame))
            case kind:
                self._log_once(f"frame {kind}", logging.WARNING, "a newer weaver sent %r, ignored", kind)

    def _take_command(self, frame: list[Any]) -> None:
        try:
            acknowledged = self._inbox.receive(Command.from_body(frame))
        except UnknownCommandKind as error:
            acknowledged = Acknowledged(error.id, Acknowledgement.failed(str(error)))
        if acknowledged is not None:
            self._frames.append(acknowledged)

    def _say_goodbye(self, connection: ThreadletConnection, welcome: ThreadletWelcome) -> None:
        """Send the last frame, and wait until the weaver has read it and closes the connection."""
        if welcome.spent:
            connection.put(self._account())
        goodbye = self._goodbye
        if not welcome.exits:
            goodbye = Bye(goodbye.reason, goodbye.ending if welcome.endings else goodbye.ending.plain)
        connection.put(goodbye)
        self._said = not welcome.goodbyes
        deadline = time.monotonic() + (STORED_WITHIN if welcome.goodbyes else GOODBYE_TIMEOUT)
        if len(self._reports):  # the answer tells that these are stored, too
            deadline = max(deadline, self._deadline)
        with contextlib.suppress(OSError, ConnectionOver, ProtocolMismatch):
            while (connection.waiting or not self._said) and (left := deadline - time.monotonic()) > 0:
                self._said |= any(frame[0] == GoodbyeStored.KIND for frame in connection.exchange(left))
            self._said = True  # a weaver that is late has it all the same
            if isinstance(goodbye, Leaving):
                connection.tell_exit_code()
                return
            connection.end_sending()
            while (left := deadline - time.monotonic()) > 0:
                connection.exchange(left)


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the program has closed every file, as one that becomes a daemon does
        sock.close()


def format_stacks() -> str:
    """Return the stack of every thread of this process, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"Thread {names.get(ident, '?')} ({ident}):\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
    )
