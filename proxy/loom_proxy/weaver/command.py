"""`CommandProxy` and `InjectionProxy`: handles of commands to replicas and of injected faults."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

from loom.control.commands import Acknowledgement
from loom.control.operations import Ask
from loom.errors import LoomError, WaitTimeout, WeaverUnavailable, because
from loom.weaver.views import CommandState, few
from loom_proxy.futures.timing import check_timeout
from loom_proxy.session.transport_and_handshake import TRANSIENT

ASK_FOR = 5.0
"""Seconds that one request waits for acknowledgements at most, and so the longest delay of an interrupt."""

AWAY = 600.0  # seconds for which a wait goes on while the weaver or the gateway is away
ASK_AGAIN = 0.5  # seconds between two requests at most while one of them is away


class _Absence(NamedTuple):
    """An absence of the weaver or the gateway, during which neither answers."""

    since: float
    error: LoomError


class CommandProxy:
    """A command that was given to replicas.

    The command outlives this program. Replicas that are away get it as soon as they are back.
    """

    def __init__(self, ask: Ask, answer: Mapping[str, Any]) -> None:
        self._ask = ask
        self._state = CommandState.from_body(answer)
        self._away: _Absence | None = None
        self.id: str = self._state.id
        """The id by which other programs find the command; see `WeaverProxy.command_of`."""
        self.replicas: tuple[str, ...] = self._state.replicas
        """The replicas that the command is for. Empty if the target names none that lives."""

    def done(self) -> bool:
        """Return whether every replica has answered, as far as this program knows; send no request."""
        return self._state.done

    def outcomes(self) -> dict[str, Acknowledgement]:
        """Return each replica's acknowledgement, which is ``waiting`` if the replica has not answered."""
        if not self._state.done:
            self._update(0.0)
        return dict(self._state.outcomes)

    def get(self, timeout: float | None = None) -> dict[str, Acknowledgement]:
        """Wait until every replica has applied or refused the command, or has ended; return the acknowledgements.

        Args:
            timeout: seconds to wait at most; None waits for ever, but for `AWAY` seconds at most while the weaver
                or the gateway is away.

        Returns:
            The acknowledgement of each replica, by its id.

        Raises:
            WaitTimeout: not all replicas have answered. `outcomes` has the acknowledgements of those that have.
            WeaverUnavailable, GatewayUnreachable: the weaver or the gateway was away when the time was over.
        """
        timeout = check_timeout(timeout)
        until = None if timeout is None else time.monotonic() + timeout
        while not self._state.done:
            left = ASK_FOR if until is None else max(0.0, min(ASK_FOR, until - time.monotonic()))
            self._ask_patiently(left)
            if until is not None and time.monotonic() >= until:
                break
        if self._state.done:
            return dict(self._state.outcomes)
        raise self._late(timeout) if self._away is None else self._away.error

    def __await__(self) -> Generator[Any, None, dict[str, Acknowledgement]]:
        return self._await().__await__()

    async def _await(self) -> dict[str, Acknowledgement]:
        while not self._state.done:
            await asyncio.to_thread(self._ask_patiently, ASK_FOR)
        return dict(self._state.outcomes)

    def _ask_patiently(self, wait: float) -> None:
        """Ask once. Without an answer, return after a moment; raise the error once that has lasted for `AWAY`."""
        try:
            self._update(wait)
        except (WeaverUnavailable, *TRANSIENT) as error:
            now = time.monotonic()
            self._away = _Absence(now if self._away is None else self._away.since, error)
            if now - self._away.since >= AWAY:
                raise
            time.sleep(min(wait, ASK_AGAIN))
            return
        self._away = None

    def _update(self, wait: float) -> None:
        self._state = CommandState.from_body(self._ask("command_state", id=self.id, wait=wait))

    def _late(self, timeout: float | None) -> WaitTimeout:
        late = [id for id, one in self._state.outcomes.items() if one.waiting]
        why = self._state.outcomes[late[0]].reason
        return WaitTimeout(because(f"within {timeout:g} s no acknowledgement from {few(late)}", why))

    def __repr__(self) -> str:
        state = "done" if self._state.done else "waiting"
        return f"<CommandProxy {self.id} to {len(self.replicas)} replicas, {state}>"


class InjectionProxy(CommandProxy):
    """An injected fault. ``get`` waits until each replica that it hits has reported it."""

    def __init__(self, ask: Ask, answer: Mapping[str, Any]) -> None:
        super().__init__(ask, answer)
        self._piece: Mapping[str, Any] = answer.get("evidence") or {}

    @property
    def evidence(self) -> dict[str, Mapping[str, Any]]:
        """The evidence that the fault is in place, by replica; for a process of Loom, under the empty name."""
        found = {id: one.evidence for id, one in self.outcomes().items() if one.ok}
        return {"": self._piece, **found} if self._piece else found

    def remove(self) -> CommandProxy:
        """Remove the fault before its time is over. The command is done when one replica has removed it.

        Raises:
            UnknownReplica: no replica that lives could remove the fault.
        """
        return CommandProxy(self._ask, self._ask("remove_fault", injection=self.id))
