"""Futures."""

from __future__ import annotations

import asyncio
import os
import tempfile
from typing import Any

from tests.parity.actors import Counter, Gate, Trouble


def _open(pipe: str) -> None:
    open(pipe, "w").close()


def _one(api: Any) -> Any:
    return api.spawn(Counter, 1).slice(hosts=0, gpus=0)


def get_twice(hosts: Any, api: Any) -> Any:
    one = _one(api)
    future = one.add.call_one(1)
    failing = one.fail_at.call_one(0)
    return [
        future.get(timeout=30),
        future.get(),
        future.result(),
        future.exception(),
        api.raised(lambda: failing.get(timeout=30)),
        api.raised(lambda: failing.get()),
        failing.exception(),
        one.value.call_one().get(timeout=30),
    ]


def a_timeout_does_not_consume(hosts: Any, api: Any) -> Any:
    gate = api.spawn(Gate).slice(hosts=0, gpus=0)
    with tempfile.TemporaryDirectory() as folder:
        pipe = os.path.join(folder, "pipe")
        os.mkfifo(pipe)
        future = gate.wait.call_one([pipe])
        errors = [api.raised(lambda: future.get(timeout=0.05)), api.raised(lambda: future.get(0))]
        open(pipe, "w").close()
        return errors, future.get(timeout=30)


def timeouts_that_are_none(hosts: Any, api: Any) -> Any:
    one = _one(api)
    calls = [lambda timeout=timeout: one.value.call_one().get(timeout=timeout) for timeout in (-1, float("nan"))]
    return [api.raised(do) for do in calls]


def await_them(hosts: Any, api: Any) -> Any:
    one = _one(api)

    async def main() -> Any:
        future = one.add.call_one(1)
        first = await future
        again = await future
        values = await one.add.call(1)
        try:
            await one.raise_this.call_one(Trouble("awaited", 1))
        except api.ActorError as error:
            return first, again, values, error
        return "no error"

    return asyncio.run(main())


def gather_them(hosts: Any, api: Any) -> Any:
    one = _one(api)

    async def main() -> Any:
        futures = [one.add.call_one(1).as_asyncio() for _ in range(10)]
        failing = one.raise_this.call_one(Trouble("gathered", 1)).as_asyncio()
        results = await asyncio.gather(*futures, failing, return_exceptions=True)
        return isinstance(futures[0], asyncio.Future), results

    return asyncio.run(main())


def await_after_get_and_get_after_await(hosts: Any, api: Any) -> Any:
    one = _one(api)
    first, second = one.add.call_one(1), one.add.call_one(1)
    got = first.get(timeout=30)

    async def main() -> Any:
        return await first, await second, await asyncio.wait_for(second.as_asyncio(), 30)

    return got, asyncio.run(main()), second.get(timeout=30)


def as_asyncio_without_a_loop(hosts: Any, api: Any) -> Any:
    future = _one(api).add.call_one(1)
    return api.raised(lambda: future.as_asyncio()), future.get(timeout=30)


def a_wait_that_is_cancelled_leaves_the_call(hosts: Any, api: Any) -> Any:
    gate = api.spawn(Gate).slice(hosts=0, gpus=0)
    with tempfile.TemporaryDirectory() as folder:
        pipe = os.path.join(folder, "pipe")
        os.mkfifo(pipe)

        async def main() -> Any:
            future = gate.wait.call_one([pipe])
            try:
                await asyncio.wait_for(future.as_asyncio(), 0.05)
            except asyncio.TimeoutError:
                _open(pipe)
            return await future

        return asyncio.run(main())


def results_are_one_object(hosts: Any, api: Any) -> Any:
    future = _one(api).echo.call_one([1])
    return future.get(timeout=30) is future.get()


def futures_of_meshes(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter)
    return [
        hosts.initialized.get(timeout=30),
        api.procs.initialized.get(timeout=30),
        counters.initialized.get(timeout=30),
        api.procs.slice(gpus=0).initialized.get(timeout=30),
        counters.slice(gpus=0).initialized.get(timeout=30),
    ]


def futures_cannot_be_made(hosts: Any, api: Any) -> Any:
    return api.raised(lambda: api.Future())
