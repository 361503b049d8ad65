"""Stopping meshes, and using them afterwards."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.parity.actors import Cleaner, Counter


def stop_actors(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter, 1)
    counters.value.call().get(timeout=30)
    counters.stop().get(timeout=30)  # gives None by Monarch's annotations, () in fact
    return [
        api.raised(lambda: counters.value.call().get(timeout=30)),
        api.raised(lambda: counters.slice(hosts=0, gpus=0).value.call_one().get(timeout=30)),
        api.spawn(Counter, 2).value.call().get(timeout=30),
    ]


def stop_actors_twice(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter, 1)
    counters.value.call().get(timeout=30)
    counters.stop("first").get(timeout=30)
    counters.stop("second").get(timeout=30)


def broadcast_to_stopped_actors(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter, 1)
    counters.stop().get(timeout=30)
    return counters.add.broadcast(1)


def stop_procs(hosts: Any, api: Any) -> Any:
    procs = hosts.spawn_procs(name="stopping")
    counters = procs.spawn("counters", Counter, 1)
    counters.value.call().get(timeout=30)
    return [
        procs.stop().get(timeout=30),
        api.raised(lambda: counters.value.call().get(timeout=30)),
        api.raised(lambda: counters.slice(hosts=1).value.call_one().get(timeout=30)),
        api.raised(lambda: procs.spawn("more", Counter).value.call().get(timeout=30)),
    ]


def procs_as_a_context(hosts: Any, api: Any) -> Any:
    async def main() -> Any:
        async with hosts.slice(hosts=slice(0, 1)).spawn_procs(name="context") as procs:
            counters = procs.spawn("counters", Counter, 1)
            values = await counters.add.call(1)
        try:
            async with procs:
                pass
        except RuntimeError as error:
            return values, error
        return values

    return asyncio.run(main())


def cleanup_when_stopped(hosts: Any, api: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        cleaners = api.spawn(Cleaner, os.path.join(folder, "how"))
        cleaners.ready.call().get(timeout=30)
        cleaners.stop().get(timeout=30)
        return [Path(folder, name).read_text() for name in os.listdir(folder)]


def meshes_live_on_without_their_proxies(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter, 1)
    part = counters.slice(hosts=1)
    del counters
    return part.add.call(1).get(timeout=30)
