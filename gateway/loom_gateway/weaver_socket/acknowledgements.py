"""The acknowledgements of a command, each as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from loom.control.operations import MAX_WAIT
from loom.errors import WeaverUnavailable
from loom.weaver.client import WeaverClient

SHOW_WAITING = 5.0
"""Seconds after which the replicas that have not acknowledged a command are told, once, with the reasons."""

MAX_FOLLOWED = MAX_WAIT
"""Seconds for which the acknowledgements of a command are waited for."""

BETWEEN_ATTEMPTS = 0.2
"""Seconds between two attempts to ask a weaver that is away."""


async def acknowledgements(
    weaver: WeaverClient, of: dict[str, str], given: dict[str, Any]
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield each acknowledgement of a command once, as (replica, `Acknowledgement` as JSON).

    After `SHOW_WAITING` seconds, and in the end after `MAX_FOLLOWED`, a replica that has not acknowledged the
    command is yielded with an acknowledgement that is ``waiting``. A weaver that is away is waited for.

    Args:
        of: whose command it is, as `whose` returns.
        given: the `CommandState` of the command, as JSON.

    Raises:
        LoomError: the weaver does not know the command any more.
    """
    loop = asyncio.get_running_loop()
    show, end = loop.time() + SHOW_WAITING, loop.time() + MAX_FOLLOWED
    told: set[str] = set()
    state = given
    while True:
        for replica, one in _made(state, told):
            told.add(replica)
            yield replica, one
        now = loop.time()
        if state["done"] or now >= end:
            break
        if now >= show:
            show = end
            state = await _state(weaver, of, given["id"], end)
            for replica, one in _waiting(state):
                yield replica, one
        else:
            # A count tells the weaver which ones are new; it keeps them in the order in which they came.
            state = await _state(weaver, of, given["id"], end, wait=min(show, end) - now, after=len(told))
    # A weaver that was started again may have another order, so that one was passed over.
    if len(told) < len(given["replicas"]):
        state = await _state(weaver, of, given["id"], end + SHOW_WAITING)
        for replica, one in [*_made(state, told), *_waiting(state)]:
            yield replica, one


async def _state(
    weaver: WeaverClient, of: dict[str, str], command: str, end: float, **arguments: Any
) -> dict[str, Any]:
    """Return the state of a command; while the weaver is away, try until a time of the loop's clock."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            state: dict[str, Any] = await weaver.do("command_state", "", **of, id=command, **arguments)
            return state
        except WeaverUnavailable:
            if loop.time() >= end:
                raise
            await asyncio.sleep(BETWEEN_ATTEMPTS)


def _made(state: dict[str, Any], told: set[str]) -> list[tuple[str, dict[str, Any]]]:
    outcomes = state["outcomes"].items()
    return [(replica, one) for replica, one in outcomes if replica not in told and not one.get("waiting")]


def _waiting(state: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(replica, one) for replica, one in state["outcomes"].items() if one.get("waiting")]
