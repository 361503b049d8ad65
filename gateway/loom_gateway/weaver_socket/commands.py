"""`SocketCommands`: answers the messages of one client of the WebSocket ``/ws/v1/weaver``.

The answers come in the order of the messages. Those to a change are ``accepted``, an ``acknowledgement`` of each
replica as it comes, and ``done``; the acknowledgements hold up no later message. A change that has begun goes on if
the client leaves. Messages with the names of torchLoom, such as ``pause_training``, are aliases of commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from pydantic import BaseModel, ValidationError

from loom.control.commands import Acknowledgement
from loom.control.operations import MAX_WAIT, GiveCommand, InjectFault, Operation, RemoveFault, SetPolicy
from loom.errors import (
    LimitReached,
    LoomError,
    ProtocolMismatch,
    TokenRevoked,
    TooLarge,
    WeaverUnavailable,
    WrongArguments,
)
from loom.process import tasks
from loom.weaver.client import WeaverClient
from loom.weaver.views import CommandState, InjectionState
from loom_gateway.access.control import AccessControl
from loom_gateway.access.sessions import Principal
from loom_gateway.rest.weaver_changes import ConfigUpdate, Name, Note, WeaverChanges
from loom_gateway.rest.weaver_changes import checked_change as _read
from loom_gateway.weaver_socket.subscribers import PageSubscription, read_subscription

MAX_MESSAGE = 64 << 10
"""Bytes of a client's message at most."""

MAX_ID = 200
"""Characters of a message's id at most."""

Id = str | int | None
"""The id of a message, of the client's choice; None if it has none."""

Reader = Callable[[Mapping[str, Any]], Operation]
"""Returns the change that the fields of a message ask for."""


class _OfReplica(BaseModel, extra="forbid"):
    replica_id: Name


class _OfDevice(BaseModel, extra="forbid"):
    device_id: Name


class _UICommand(BaseModel, extra="forbid"):
    command_type: str
    target_id: str = ""
    params: Mapping[str, Any] = {}


def read_message(text: str | None) -> Mapping[str, Any]:
    """Return the JSON object that is a message.

    Raises:
        TooLarge: it has more than `MAX_MESSAGE` bytes.
        ProtocolMismatch: it is no JSON object with a text as ``type``.
    """
    if text is None:
        raise ProtocolMismatch("a message is a text with a JSON object, not bytes")
    if len(text) > MAX_MESSAGE or len(text.encode()) > MAX_MESSAGE:
        raise TooLarge(f"a message has at most {MAX_MESSAGE >> 10} KiB")
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolMismatch(f"a message is a JSON object: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolMismatch(f'a message is a JSON object with a "type", not {message!r:.80}')
    if "\\u" in text and not _is_unicode(message):
        raise ProtocolMismatch("a message has only whole characters, no half of a surrogate pair")
    return message


def read_id(message: Mapping[str, Any]) -> Id:
    """Return the id of a message, for the answers to it."""
    id = message.get("id")
    if id is None or type(id) is int or (isinstance(id, str) and len(id) <= MAX_ID):
        return id
    raise WrongArguments(f"an id is a number, or a text of at most {MAX_ID} characters")


def check_kind(message: Mapping[str, Any]) -> None:
    """Raise `WrongArguments` if a message's type is not that of a change."""
    if message["type"] not in _READERS:
        known = ", ".join(["ping", "subscribe", *_READERS])
        raise WrongArguments(f"there is no message of type {message['type']!r:.80}; known: {known}")


def read_change(message: Mapping[str, Any]) -> Operation:
    """Return the change that a message asks for. Raise `WrongArguments` if its fields make no sense."""
    kind = message["type"]
    fields = {name: value for name, value in message.items() if name != "type"}
    try:
        return _READERS[kind](fields)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise WrongArguments(f"the message {kind!r} makes no sense: {wrong[:2000]}") from None


def _is_unicode(message: Mapping[str, Any]) -> bool:
    try:
        json.dumps(message, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _change(operation: type[Operation], takes_id: bool) -> Reader:
    """Return the reader of the message that is an operation; its id may be the operation's own."""

    def read(fields: Mapping[str, Any]) -> Operation:
        if operation is GiveCommand and fields.get("id") is None:
            raise WrongArguments(
                "a command needs an id, of 8 to 64 letters, digits, - and _: it makes a repetition safe"
            )
        if "wait" in fields:
            raise WrongArguments("wait is for REST: over the WebSocket each acknowledgement comes by itself")
        return _read(operation, fields if takes_id else _without_id(fields))

    return read


def _config_update(fields: Mapping[str, Any]) -> GiveCommand:
    return ConfigUpdate.model_validate(_without_id(fields)).to_command(id=fields.get("id"))


def _alias(name: str, field: str) -> Reader:
    """Return a reader of the message that is one of torchLoom's names; a field of it names what is meant."""
    asked = _OfReplica if field == "replica_id" else _OfDevice

    def read(fields: Mapping[str, Any]) -> GiveCommand:
        target = getattr(asked.model_validate(_without_id(fields)), field)
        return _read(GiveCommand, {"kind": name, "target": target, "id": fields.get("id")})

    return read


def _ui_command(fields: Mapping[str, Any]) -> GiveCommand:
    asked = _UICommand.model_validate(fields.get("data"))
    command = {"kind": asked.command_type, "target": asked.target_id or None, "params": asked.params}
    return _read(GiveCommand, {**command, "id": fields.get("id")})


def _without_id(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in fields.items() if name != "id"}


_OF_REPLICAS = ("pause_training", "resume_training", "stop_training", "reactivate_group")

_READERS: dict[str, Reader] = {
    "command": _change(GiveCommand, takes_id=True),
    "policy": _change(SetPolicy, takes_id=False),
    "inject": _change(InjectFault, takes_id=True),
    "remove_fault": _change(RemoveFault, takes_id=False),
    "update_config": _config_update,
    **{name: _alias(name, "replica_id") for name in _OF_REPLICAS},
    **{name: _alias(name, "device_id") for name in ("deactivate_device", "drain_device")},
    "ui_command": _ui_command,
}


MAX_WAITING = 64
"""Changes of one socket whose acknowledgements may be waited for at the same time."""

BETWEEN_SUBSCRIPTIONS = 0.05
"""Seconds between two subscriptions of one socket, apart from a few. The messages after one wait for its turn."""

FEW_SUBSCRIPTIONS = 10

LEFT = 499
"""The status, in the audit, of a change whose client left before the answer."""

Send = Callable[[Mapping[str, object]], Awaitable[None]]
"""Sends a message to the client, once the client has taken those before it."""

Subscribe = Callable[[PageSubscription], None]
"""Replaces what a page subscribes to."""


class SocketCommands:
    """The messages of one client.

    Args:
        of: whose replicas the client watches and commands, as `whose` returns.
        path: the path of the WebSocket, for the audit.
        subscribe: for the socket of a page; None for another one.
    """

    def __init__(
        self,
        changes: WeaverChanges,
        weaver: WeaverClient,
        access: AccessControl,
        principal: Principal,
        of: Mapping[str, str],
        path: str,
        send: Send,
        subscribe: Subscribe | None = None,
    ) -> None:
        self._changes = changes
        self._weaver = weaver
        self._access = access
        self._principal = principal
        self._of = of
        self._asked = {"method": "WS", "path": path[:200]}
        self._send = send
        self._subscribe_to = subscribe
        self._next_subscription = 0.0
        self._waiting: set[asyncio.Task[Any]] = set()

    async def answer(self, text: str | None) -> None:
        """Answer a message, apart from acknowledgements that are still to come.

        Raises:
            TokenRevoked: the client's token was revoked or has expired, so that the socket has to be closed.
        """
        id: Id = None
        try:
            message = read_message(text)
            id = read_id(message)
            if message["type"] == "ping":
                await self._send({"type": "pong", "id": id})
            elif message["type"] == "subscribe":
                await self._subscribe(id, message)
            else:
                await self._change(id, message)
        except TokenRevoked:
            raise
        except LoomError as error:
            await self._refuse(id, error)

    async def close(self) -> None:
        """Send nothing more."""
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)

    async def _subscribe(self, id: Id, message: Mapping[str, Any]) -> None:
        now = asyncio.get_running_loop().time()
        begin = max(self._next_subscription, now - FEW_SUBSCRIPTIONS * BETWEEN_SUBSCRIPTIONS)
        self._next_subscription = begin + BETWEEN_SUBSCRIPTIONS
        await asyncio.sleep(max(0.0, begin - now))
        if self._subscribe_to is None:
            raise WrongArguments("only a page subscribes: offer the subprotocol loom.page")
        self._subscribe_to(read_subscription(message))
        await self._send({"type": "subscribed", "id": id})

    async def _change(self, id: Id, message: Mapping[str, Any]) -> None:
        check_kind(message)
        self._access.confirm(self._principal)
        self._access.require(self._principal, "operate", f"{message['type']} over the WebSocket")
        self._access.count_request(self._principal)
        if len(self._waiting) >= MAX_WAITING:
            raise LimitReached(
                f"{MAX_WAITING} changes of this socket wait for acknowledgements: wait for one of them"
            )
        await self._access.audit.ask(self._principal.token, self._principal.peer, **self._asked)
        making = asyncio.ensure_future(self._make(message))
        making.add_done_callback(lambda made: made.cancelled() or made.exception())  # if nobody waits any more
        # A command that has begun is not cancelled: the audit has to record its outcome.
        given = await asyncio.shield(making)
        about = {"command": given and given.id, "replicas": list(given.replicas) if given else []}
        await self._send({"type": "accepted", "id": id, **about})
        task = tasks.run("follow a command", self._follow(id, given))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _make(self, message: Mapping[str, Any]) -> InjectionState | None:
        """Make the change of a message; return its state, with evidence if it is a fault; None for a policy."""
        by, of = self._principal, self._of
        async with self._audited() as note:
            change = read_change(message)
            made = await self._changes.make(change, by, of, note)
            return InjectionState.from_body(made) if change.gives else None

    @asynccontextmanager
    async def _audited(self) -> AsyncIterator[Note]:
        """Write into the audit what was noted, with the status that REST would have answered."""
        event, details, status = "commanded", dict[str, object](), LEFT

        def note(what: str, about: Mapping[str, object]) -> None:
            nonlocal event, details
            event, details = what, dict(about)

        try:
            yield note
            status = 200
        except LoomError as error:
            status = error.http_status
            raise
        except Exception:
            status = 500
            raise
        finally:
            who = self._principal
            await self._access.audit.write(event, who.token, who.peer, **self._asked, status=status, **details)

    async def _follow(self, id: Id, given: InjectionState | None) -> None:
        """Send the acknowledgements of a command as they come, and then that it is done."""
        about = {"id": id, "command": given and given.id}
        with contextlib.suppress(OSError):  # the client has left
            try:
                if given is not None:
                    async for replica, one in acknowledgements(self._weaver, self._of, given):
                        waiting = {"waiting": False, **one.to_body()}
                        await self._send({"type": "acknowledgement", **about, "replica": replica, **waiting})
            except LoomError as error:
                await self._refuse(id, error)
                return
            evidence = {"evidence": given.evidence} if given is not None and given.evidence else {}
            await self._send({"type": "done", **about, **evidence})

    async def _refuse(self, id: Id, error: LoomError) -> None:
        await self._send({"type": "error", "id": id, "code": error.code, "message": str(error)})


SHOW_WAITING = 5.0
"""Seconds after which the replicas that have not acknowledged a command are told, once, with the reasons."""

MAX_FOLLOWED = MAX_WAIT
"""Seconds for which the acknowledgements of a command are waited for."""

BETWEEN_ATTEMPTS = 0.2
"""Seconds between two attempts to ask a weaver that is away."""


async def acknowledgements(
    weaver: WeaverClient, of: Mapping[str, str], given: CommandState
) -> AsyncIterator[tuple[str, Acknowledgement]]:
    """Yield each acknowledgement of a command once, with its replica.

    After `SHOW_WAITING` seconds, and in the end after `MAX_FOLLOWED`, a replica that has not acknowledged the
    command is yielded with an acknowledgement that is ``waiting``. A weaver that is away is waited for.

    Args:
        of: whose command it is, as `whose` returns.

    Raises:
        LoomError: the weaver does not know the command any more.
    """
    loop = asyncio.get_running_loop()
    show, end = loop.time() + SHOW_WAITING, loop.time() + MAX_FOLLOWED
    told: set[str] = set()
    state = given
    while True:
        for replica, one in _those(state, waiting=False):
            if replica not in told:
                told.add(replica)
                yield replica, one
        now = loop.time()
        if state.done or now >= end:
            break
        if now >= show:
            show = end
            state = await _state(weaver, of, given.id, end)
            for replica, one in _those(state, waiting=True):
                yield replica, one
        else:
            # A count tells the weaver which ones are new; it keeps them in the order in which they came.
            state = await _state(weaver, of, given.id, end, wait=min(show, end) - now, after=len(told))
    # A weaver that was started again may have another order, so that one was passed over.
    if len(told) < len(given.replicas):
        state = await _state(weaver, of, given.id, end + SHOW_WAITING)
        for replica, one in [*_those(state, waiting=False), *_those(state, waiting=True)]:
            if replica not in told:
                yield replica, one


async def _state(
    weaver: WeaverClient, of: Mapping[str, str], command: str, end: float, **arguments: Any
) -> CommandState:
    """Return the state of a command; while the weaver is away, try until a time of the loop's clock."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return CommandState.from_body(await weaver.do("command_state", "", **of, id=command, **arguments))
        except WeaverUnavailable:
            if loop.time() >= end:
                raise
            await asyncio.sleep(BETWEEN_ATTEMPTS)


def _those(state: CommandState, waiting: bool) -> list[tuple[str, Acknowledgement]]:
    return [(replica, one) for replica, one in state.outcomes.items() if one.waiting is waiting]
