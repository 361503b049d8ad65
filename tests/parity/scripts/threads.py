"""Where and in which order an actor's methods run, and what reaches the code that they start."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

from loom import Actor, concurrent_endpoint, context, current_rank, endpoint


class Local(Actor):
    """Counts in thread-local storage, also through an endpoint with a port and a plain method."""

    def __init__(self) -> None:
        self.local = threading.local()
        self.local.n = 0
        self.idents = {threading.get_ident()}

    def _count(self) -> int:
        self.idents.add(threading.get_ident())
        self.local.n += 1
        return int(self.local.n)

    @endpoint
    def count(self) -> int:
        return self._count()

    @endpoint(explicit_response_port=True)
    def count_to(self, port: Any) -> None:
        port.send(self._count())

    @endpoint
    def threads(self) -> int:
        return len(self.idents)

    def plain(self) -> int:
        return self._count()


class AsyncLocal(Actor):
    """Remembers the loop and the thread of each of its endpoints."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]] = set()
        self.order: list[str] = []

    @endpoint
    async def see(self) -> int:
        self.seen.add((id(asyncio.get_running_loop()), threading.get_ident()))
        return len(self.seen)

    @endpoint
    async def slowly(self, name: str, turns: int) -> list[str]:
        self.order.append(f"{name} begins")
        for _ in range(turns):
            await asyncio.sleep(0)
        self.order.append(f"{name} ends")
        return self.order

    @endpoint
    async def in_a_task(self) -> tuple[bool, bool]:
        here = dict(current_rank())

        async def rank() -> dict[str, int]:
            return dict(current_rank())

        return await asyncio.create_task(rank()) == here, await asyncio.to_thread(
            lambda: dict(current_rank())
        ) == here


class Crossing(Actor):
    """Its endpoints wait for each other."""

    def __init__(self) -> None:
        self.come = 0
        self.both = asyncio.Event()

    @concurrent_endpoint
    async def meet(self) -> int:
        self.come += 1
        if self.come == 2:
            self.both.set()
        await self.both.wait()
        return self.come


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("loom_parity_variable", default="unset")


class Variables(Actor):
    @endpoint
    def set_and_read(self, value: str) -> tuple[str, str]:
        before = VARIABLE.get()
        VARIABLE.set(value)
        return before, VARIABLE.get()

    @endpoint
    def message_rank(self) -> tuple[dict[str, int], dict[str, int]]:
        return dict(context().message_rank), dict(context().actor_instance.rank)


def a_thread_of_its_own(hosts: Any, api: Any) -> Any:
    local = api.spawn(Local).slice(hosts=0, gpus=0)
    counts = [
        local.count.call_one().get(timeout=30),
        local.count_to.call_one().get(timeout=30),
        api.as_endpoint(local.plain).call_one().get(timeout=30),
        local.count.call_one().get(timeout=30),
    ]
    return counts, local.threads.call_one().get(timeout=30)


def a_loop_of_its_own(hosts: Any, api: Any) -> Any:
    one = api.spawn(AsyncLocal).slice(hosts=1, gpus=1)
    return [one.see.call_one().get(timeout=30) for _ in range(3)], one.in_a_task.call_one().get(timeout=30)


def one_message_after_the_other(hosts: Any, api: Any) -> Any:
    one = api.spawn(AsyncLocal).slice(hosts=0, gpus=0)
    first, second = one.slowly.call_one("a", 20), one.slowly.call_one("b", 1)
    return first.get(timeout=30), second.get(timeout=30)


def concurrent_endpoints_that_meet(hosts: Any, api: Any) -> Any:
    one = api.spawn(Crossing).slice(hosts=0, gpus=0)
    first, second = one.meet.call_one(), one.meet.call_one()
    return first.get(timeout=30), second.get(timeout=30)


def a_context_for_each_message(hosts: Any, api: Any) -> Any:
    variables = api.spawn(Variables)
    one = variables.slice(hosts=0, gpus=1)
    return [
        one.set_and_read.call_one("a").get(timeout=30),
        one.set_and_read.call_one("b").get(timeout=30),
        variables.slice(gpus=1).message_rank.call().get(timeout=30),
    ]
