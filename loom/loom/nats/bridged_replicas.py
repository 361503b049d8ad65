"""`BridgedReplicas`: the replicas whose processes have no threadlet, and speak NATS instead.

`Screen` checks the messages of those processes before a byte of them is believed.

For each of them the bridge speaks the threadlets' protocol with the weaver, so that the replica is one like any
other: it registers, it is lost when its heartbeats end, and it gets commands. The bridge publishes those commands.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from nats.aio.msg import Msg

from loom.control.address import WeaverAddress, parse_weaver_address
from loom.control.commands import Acknowledged, Acknowledgement, Command
from loom.control.frame import Frame
from loom.control.handshake import Bye, TrainingEnding
from loom.control.reports import DeviceFailed, DeviceReport, Registration
from loom.errors import Conflict, Denied, LimitReached, LoomError, NotFound, RateLimited, Unavailable
from loom.nats.message_counts import SUBJECT_RATE, Bucket, MessageTrouble, Tally
from loom.nats.outside_replica import OutsideReplica
from loom.nats.reports import (
    CommandAnswer,
    DeviceRegistration,
    DrainReport,
    ProgressReport,
    Sign,
    UseReport,
    read_report,
)
from loom.nats.state import BridgeState
from loom.nats.subjects import HEADER, SOURCE, Body, Envelope, EnvelopeKind, Format, Reply, decode, error_reply
from loom.process import tasks
from loom.process.backoff import Backoff
from loom.replica_link import ReplicaLink

logger = logging.getLogger(__name__)

MAX_REPLICAS = 1000
"""Replicas of one bridge. The one that has been silent longest makes room for a new one."""

TICK = 0.1  # seconds between two looks at every replica
SETTLE_TIMEOUT = 5.0  # seconds that the answer to a registration waits for the weaver
GOODBYE_TIMEOUT = 2.0  # seconds that the weaver has to read a goodbye and close the connection

_AGAIN = Backoff(0.2, 5.0, jitter=0.5)  # waits between attempts to connect a replica with the weaver
_BLIND = "its process has no threadlet, and the bridge, which speaks for it, cannot look into it"
_WEAVER = "the link to the weaver"  # what the tally calls it


class _Outcome:
    """The state of a replica's registration."""

    def __init__(self) -> None:
        self.is_known = asyncio.Event()
        """Set when the weaver has welcomed the replica, or never will."""
        self.error: LoomError | None = None
        """Why the weaver has not welcomed the replica."""


class BridgedReplicas:
    """The table of the replicas without threadlets.

    ``ask_address`` returns the weaver's address for threadlets. ``publish`` publishes a command for a replica, and
    raises a `LoomError` if the command cannot be said on NATS.
    """

    def __init__(
        self,
        state: BridgeState,
        tally: Tally,
        ask_address: Callable[[], Awaitable[str]],
        publish: Callable[[OutsideReplica, Command], Awaitable[None]],
    ) -> None:
        self._state = state
        self._tally = tally
        self._ask_address = ask_address
        self._publish = publish
        self._address: WeaverAddress | None = None
        self._asking = asyncio.Lock()
        self._replicas = {id: OutsideReplica.restored(id, body) for id, body in state.replicas().items()}
        self._by_device = {device: one for one in self._replicas.values() for device in one.devices}
        """For each device a replica that has registered it."""
        self._outcomes = {replica: _Outcome() for replica in self._replicas.values()}
        self._links: dict[OutsideReplica, ReplicaLink] = {}
        self._tasks: dict[OutsideReplica, asyncio.Task[None]] = {}
        """The task that keeps each living replica connected with the weaver."""
        self._leaving: set[asyncio.Task[None]] = set()  # those that wait for the weaver to read a goodbye
        self._beats: dict[OutsideReplica, float] = {}  # when the next heartbeat of each connected replica is due
        self._commands: asyncio.Queue[tuple[OutsideReplica, Command]] = asyncio.Queue()  # to publish
        self._takers: dict[type[Any], Callable[[Any, float], OutsideReplica]] = {
            DeviceRegistration: self._register,
            ProgressReport: self._progress,
            Sign: self._sign,
            UseReport: self._use,
            DrainReport: self._drain,
            CommandAnswer: self._answer,
        }

    @property
    def connected(self) -> int:
        """The number of replicas that are connected with the weaver."""
        return sum(link.is_open for link in self._links.values())

    def take(self, envelope: Envelope, age: float = 0.0) -> OutsideReplica:
        """Take a message that was sent ``age`` seconds ago; return the replica that it is about.

        Raises:
            NotFound: nobody has registered the replica, or the device.
            LimitReached: the replica sends too much, or there are too many replicas.
            WrongArguments: the message makes no sense.
        """
        report = read_report(envelope)
        return self._takers[type(report)](report, time.monotonic() - age)

    async def settle(self, replica: OutsideReplica) -> None:
        """Wait until the weaver has a replica, or raise the reason why it does not have it."""
        outcome = self._outcomes.get(replica)
        if outcome is None:  # it has ended
            return
        try:
            await asyncio.wait_for(outcome.is_known.wait(), SETTLE_TIMEOUT)
        except asyncio.TimeoutError:
            text = f"the replica {replica.id!r} is not connected with the weaver yet; the bridge goes on trying"
            raise outcome.error or Unavailable(text) from None
        if outcome.error is not None:
            raise outcome.error

    async def run(self) -> None:
        """Keep the living replicas connected with the weaver, and publish their commands, without end."""
        try:
            await asyncio.gather(self._watch(), self._publish_commands())
        finally:
            linked = [*self._tasks.values(), *self._leaving]
            for task in linked:
                task.cancel()
            await asyncio.gather(*linked, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            now = time.monotonic()
            for replica in list(self._replicas.values()):
                if replica.is_alive(now):
                    self._look_after(replica, now)
                else:
                    self._lose(replica, now)
            await asyncio.sleep(TICK)

    def _look_after(self, replica: OutsideReplica, now: float) -> None:
        if replica not in self._tasks:
            self._tasks[replica] = tasks.run_to_end("link a replica", lambda: self._keep_linked(replica))
        link = self._links.get(replica)
        if link is None or link.beat is None:
            return
        if now >= self._beats.get(replica, 0.0):
            self._beats[replica] = now + link.beat
            link.send(replica.beat())
        for command in replica.due_commands(now):
            self._commands.put_nowait((replica, command))

    def _lose(self, replica: OutsideReplica, now: float) -> None:
        """End the connection of a replica whose process has fallen silent."""
        if replica.ending is not None:
            self._end(replica, replica.ending, "its process has left")
        elif replica in self._tasks:
            logger.info("the replica %s has fallen silent", replica.id)
            if (link := self._links.get(replica)) is not None:
                link.tell_silence(now - replica.heard)
            self._unlink(replica)

    def _end(self, replica: OutsideReplica, ending: TrainingEnding, reason: str) -> None:
        """Say goodbye for a replica, and forget it."""
        self._send(replica, Bye(reason, ending))
        self._forget(replica, GOODBYE_TIMEOUT)

    def _forget(self, replica: OutsideReplica, wait: float = 0.0) -> None:
        """Forget a replica, and end its connection; see `_unlink`."""
        if self._replicas.get(replica.id) is replica:
            del self._replicas[replica.id]
            self._state.drop_replica(replica.id)
        for device in replica.devices:
            self._leave(replica, device)
        self._outcomes.pop(replica, None)
        self._unlink(replica, wait)

    def _leave(self, replica: OutsideReplica, device: str) -> None:
        """Let another replica on a device report it, if there is one."""
        if self._by_device.get(device) is replica:
            del self._by_device[device]
            others = (one for one in self._replicas.values() if one is not replica and device in one.devices)
            if (other := next(others, None)) is not None:
                self._by_device[device] = other

    def _unlink(self, replica: OutsideReplica, wait: float = 0.0) -> None:
        """End the connection of a replica, if the weaver does not do so in ``wait`` seconds."""
        if (task := self._tasks.pop(replica, None)) is not None:
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            asyncio.get_running_loop().call_later(wait, task.cancel)

    async def _keep_linked(self, replica: OutsideReplica) -> None:
        waits = iter(_AGAIN)
        outcome = self._outcomes[replica]
        while self._replicas.get(replica.id) is replica:
            link = ReplicaLink(partial(self._take_command, replica), replica.note, _BLIND)
            self._links[replica] = link
            try:
                welcome = await link.connect(await self._weaver(), replica.hello)
                replica.takes_status_types = welcome.status_types
                for frame in replica.welcomed(welcome.seq):
                    link.send(frame)
                self._welcome(replica)
                await link.serve()
                waits = iter(_AGAIN)
            except (LoomError, OSError, asyncio.TimeoutError) as error:
                self._note_failure(outcome, error)
            finally:
                del self._links[replica]
                self._beats.pop(replica, None)
            await asyncio.sleep(next(waits))

    def _note_failure(self, outcome: _Outcome, error: Exception) -> None:
        why = str(error) or type(error).__name__
        if isinstance(error, Conflict):
            # Another process may be the replica, and about to be found dead.
            outcome.error = error
            self._tally.refuse(_WEAVER, MessageTrouble.REFUSED, why)
            return
        self._address = None  # a weaver that was started again may be elsewhere, or want another key
        self._tally.refuse(_WEAVER, MessageTrouble.AWAY, why)
        if isinstance(error, Denied):
            outcome.error = error
            outcome.is_known.set()

    async def _weaver(self) -> WeaverAddress:
        async with self._asking:
            if self._address is None:
                self._address = parse_weaver_address(await self._ask_address())
            return self._address

    def _welcome(self, replica: OutsideReplica) -> None:
        if (outcome := self._outcomes.get(replica)) is None:  # it was forgotten meanwhile
            return
        outcome.error = None
        outcome.is_known.set()
        logger.info("the weaver has the replica %s", replica.id)
        if replica.farewell is not None:
            self._end(replica, *replica.farewell)

    # -- commands of the weaver --------------------------------------------------------------------------------

    def _take_command(self, replica: OutsideReplica, command: Command) -> Acknowledged | None:
        acknowledged = replica.command(command, time.monotonic())
        if acknowledged is None:
            self._commands.put_nowait((replica, command))
        return acknowledged

    async def _publish_commands(self) -> None:
        while True:
            replica, command = await self._commands.get()
            if command.id not in replica.commands:  # it was acknowledged meanwhile
                continue
            try:
                await self._publish(replica, command)
                self._tally.commands += 1
            except LoomError as error:
                made = replica.answer(command.id, Acknowledgement.failed(str(error)))
                if made is not None:
                    self._send(replica, made)

    # -- messages of the processes -----------------------------------------------------------------------------

    def _register(self, report: DeviceRegistration, sent: float) -> OutsideReplica:
        replica = self._replicas.get(report.replica_id)
        if replica is not None and not replica.is_of(report, self._state.id):
            self._forget(replica)
            replica = None
        if replica is None:
            self._make_room()
            replica = OutsideReplica.registered(report, self._state.id)
            self._replicas[replica.id], self._outcomes[replica] = replica, _Outcome()
            self._state.put_replica(replica.id, replica.to_stored())
        else:
            self._check_rate(replica)
            before = replica.to_stored()
            replica.register(report)
            if replica.to_stored() != before:
                self._state.put_replica(replica.id, replica.to_stored())
                self._send(replica, Registration(tuple(replica.devices.values())))
        self._by_device |= dict.fromkeys(replica.devices, replica)
        replica.heard = max(replica.heard, sent)
        return replica

    def _make_room(self) -> None:
        if len(self._replicas) < MAX_REPLICAS:
            return
        silent = min(self._replicas.values(), key=lambda one: one.heard)
        if silent.is_alive(time.monotonic()):
            text = f"there are {MAX_REPLICAS} replicas without threadlets, the most that a bridge takes"
            raise LimitReached(text)
        self._forget(silent)

    def _progress(self, report: ProgressReport, sent: float) -> OutsideReplica:
        replica = self._find(report.replica_id)
        frames = replica.progress(report, self._is_open(replica))
        self._send(replica, *frames)
        replica.heard = max(replica.heard, sent)
        if replica.farewell is not None and self._is_open(replica):
            self._end(replica, *replica.farewell)
        return replica

    def _sign(self, report: Sign, sent: float) -> OutsideReplica:
        replica = self._find(report.replica_id)
        replica.sign(report)
        replica.heard = max(replica.heard, sent)
        return replica

    def _use(self, report: UseReport, sent: float) -> OutsideReplica:
        replica = self._find(report.replica_id) if report.replica_id else self._by_device.get(report.device_uuid)
        if replica is None or report.device_uuid not in replica.devices:
            raise _unknown_device(report.device_uuid, replica)
        if not report.replica_id:
            self._check_rate(replica)
        self._send(replica, DeviceReport(time.time(), {report.device_uuid: report.use}))
        if report.failure is not None and report.device_uuid not in replica.failures:
            failed = DeviceFailed(uuid.uuid4().hex, report.device_uuid, report.failure)
            replica.failures[report.device_uuid] = failed
            self._send(replica, failed)
        return replica

    def _drain(self, report: DrainReport, sent: float) -> OutsideReplica:
        replica = self._find(report.replica_id)
        if report.device_uuid and report.device_uuid not in replica.devices:
            raise _unknown_device(report.device_uuid, replica)
        self._send(replica, *replica.drain(report))
        if report.device_uuid:
            self._leave(replica, report.device_uuid)
        self._state.put_replica(replica.id, replica.to_stored())
        return replica

    def _answer(self, report: CommandAnswer, sent: float) -> OutsideReplica:
        replica = self._find(report.replica_id)
        made: Acknowledged | None = replica.answered.get(report.command_id)
        made = made or replica.answer(report.command_id, report.acknowledgement)
        if made is None:
            text = f"the replica {replica.id!r} was given no command {report.command_id!r:.80}"
            raise NotFound(text, code="unknown_command")
        self._send(replica, made)
        if replica.ending is not None:
            self._state.put_replica(replica.id, replica.to_stored())
        return replica

    def _find(self, id: str) -> OutsideReplica:
        replica = self._replicas.get(id)
        if replica is None:
            text = f"no replica {id!r:.80} was registered here: publish register_device first"
            raise NotFound(text, code="unknown_replica")
        self._check_rate(replica)
        return replica

    def _check_rate(self, replica: OutsideReplica) -> None:
        if not replica.bucket.take():
            raise RateLimited(f"the replica {replica.id!r} sends more messages than a bridge takes of one")

    def _is_open(self, replica: OutsideReplica) -> bool:
        link = self._links.get(replica)
        return link is not None and link.is_open

    def _send(self, replica: OutsideReplica, *frames: Frame) -> None:
        link = self._links.get(replica)
        if link is not None and link.is_open:
            for frame in frames:
                link.send(frame)


def _unknown_device(device: str, replica: OutsideReplica | None) -> NotFound:
    whose = "no replica" if replica is None else f"the replica {replica.id!r}"
    return NotFound(f"{whose} has registered the device {device!r:.80} here", code="unknown_device")


MAX_SIZE = 64 << 10
"""Bytes of one message."""

MAX_ANSWERING = 1000  # registrations whose senders wait for the weaver
YIELD_EVERY = 20  # messages after which others get their turn: a burst comes without a pause

_EVENTS = (EnvelopeKind.REGISTER_DEVICE, EnvelopeKind.ACKNOWLEDGEMENT, EnvelopeKind.DRAIN)
REPORTED = {
    EnvelopeKind.TRAINING_STATUS: (EnvelopeKind.TRAINING_STATUS,),
    EnvelopeKind.DEVICE_STATUS: (EnvelopeKind.DEVICE_STATUS,),
    EnvelopeKind.HEARTBEAT: (EnvelopeKind.HEARTBEAT,),
    EnvelopeKind.REGISTER_DEVICE: _EVENTS,
    EnvelopeKind.ACKNOWLEDGEMENT: _EVENTS,
}
"""The kinds of messages on the subject of a kind. A body without an envelope is of the first."""


class Screen:
    """A check of size, rate and form, with a count of what passes and of what does not.

    ``subjects`` are those of the kinds in `REPORTED`.
    """

    def __init__(
        self, bridge: str, intake: BridgedReplicas, tally: Tally, subjects: dict[EnvelopeKind, str], reply: Reply
    ) -> None:
        self._bridge = bridge
        self._intake = intake
        self._tally = tally
        self._reply = reply
        self._kinds = {subjects[kind]: kinds for kind, kinds in REPORTED.items()}
        self._buckets = {subject: Bucket(SUBJECT_RATE) for subject in self._kinds}
        self._answering: set[asyncio.Task[None]] = set()
        self._turn = itertools.count(1)

    @property
    def subjects(self) -> list[str]:
        """The subjects of the messages."""
        return list(self._kinds)

    async def take(self, message: Msg) -> None:
        """Take a message as it comes from NATS."""
        # Some clients answer a command with its headers: one with this bridge's own id is not from this bridge, to
        # which NATS echoes nothing.
        if message.headers and message.headers.get(HEADER, self._bridge) != self._bridge:
            return
        if next(self._turn) % YIELD_EVERY == 0:
            await asyncio.sleep(0)
        await self.pass_on(message.subject, message.data, message.reply)

    async def pass_on(self, subject: str, data: bytes, reply: str, age: float = 0.0) -> None:
        """Pass a message that was sent ``age`` seconds ago to the intake, and reply."""
        if not self._buckets[subject].take():
            return self._tally.refuse(
                subject, MessageTrouble.TOO_MANY, f"more than {SUBJECT_RATE:g} messages come in a second"
            )
        if len(data) > MAX_SIZE:
            return self._tally.refuse(
                subject, MessageTrouble.TOO_LARGE, f"a message has {len(data)} bytes, more than {MAX_SIZE}"
            )
        try:
            first, *also = self._kinds[subject]
            envelope = decode(first, data, *also)
            if envelope.source.startswith(SOURCE):
                return
            replica = self._intake.take(envelope, age)
        except LoomError as error:
            self._tally.refuse(subject, _trouble(error), error)
            return await self._reply(error_reply(error), Format.of(data), reply)
        self._tally.taken[subject] += 1
        if reply:
            is_settled = self._intake.settle(replica) if envelope.kind is EnvelopeKind.REGISTER_DEVICE else None
            self._answer(is_settled, Format.of(data), reply)

    async def close(self) -> None:
        """Give up what waits for an answer."""
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    def _answer(self, settled: Coroutine[Any, Any, None] | None, format: Format, reply: str) -> None:
        if len(self._answering) >= MAX_ANSWERING:
            if settled is not None:
                settled.close()
            return
        task = asyncio.ensure_future(self._answer_later(settled, format, reply))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer_later(self, settled: Coroutine[Any, Any, None] | None, format: Format, reply: str) -> None:
        body: Body = {"ok": True, "done": True}
        try:
            if settled is not None:
                await settled
        except LoomError as error:
            body = error_reply(error)
        await self._reply(body, format, reply)


def _trouble(error: LoomError) -> MessageTrouble:
    if isinstance(error, NotFound):
        return MessageTrouble.UNKNOWN
    if isinstance(error, LimitReached):
        return MessageTrouble.TOO_MANY if isinstance(error, RateLimited) else MessageTrouble.FULL
    return MessageTrouble.MALFORMED
