"""Processes and actors: how they are made."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from typing import Any

from tests.parity.actors import Counter, Where


def _environment(api: Any) -> type:
    class Reader(api.Actor):  # type: ignore[misc, name-defined]
        @api.endpoint
        def variable(self) -> str | None:
            return os.environ.get("LOOM_PARITY_VARIABLE")

        @api.endpoint
        def executable(self) -> str:
            return sys.executable

        @api.endpoint
        def cpus(self) -> int:
            return len(os.sched_getaffinity(0))

    return Reader


def one_process_a_host(hosts: Any, api: Any) -> Any:
    procs = hosts.spawn_procs()
    where = procs.spawn("where", Where)
    return procs.sizes, where.rank.call().get(timeout=30)


def several_dimensions_a_host(hosts: Any, api: Any) -> Any:
    procs = hosts.slice(hosts=1).spawn_procs(per_host={"a": 2, "b": 1}, name="ab")
    where = procs.spawn("where", Where)
    return procs.sizes, where.rank.call().get(timeout=30), where.slice(a=1).own_rank.call().get(timeout=30)


def procs_on_slices_of_hosts(hosts: Any, api: Any) -> Any:
    on_one = hosts.slice(hosts=slice(1, 2)).spawn_procs(name="on_one")
    renamed = hosts.rename(hosts="nodes").spawn_procs(name="renamed")
    return [
        on_one.spawn("where", Where).rank.call().get(timeout=30),
        renamed.spawn("where", Where).rank.call().get(timeout=30),
    ]


def dimensions_that_clash(hosts: Any, api: Any) -> Any:
    return [
        api.raised(lambda: hosts.spawn_procs(per_host={"hosts": 2})),
        api.raised(lambda: hosts.rename(hosts="nodes").spawn_procs(per_host={"nodes": 1})),
    ]


def a_bootstrap_function(hosts: Any, api: Any) -> Any:
    def bootstrap() -> None:
        os.environ["LOOM_PARITY_VARIABLE"] = "set"

    procs = hosts.slice(hosts=slice(0, 1)).spawn_procs(bootstrap=bootstrap, name="bootstrapped")
    return procs.spawn("reader", _environment(api)).variable.call().get(timeout=30)


def an_async_bootstrap_function(hosts: Any, api: Any) -> Any:
    async def bootstrap() -> None:
        import asyncio

        await asyncio.sleep(0)
        os.environ["LOOM_PARITY_VARIABLE"] = "set later"

    procs = hosts.slice(hosts=slice(0, 1)).spawn_procs(bootstrap=bootstrap, name="bootstrapped")
    return procs.spawn("reader", _environment(api)).variable.call().get(timeout=30)


def a_bootstrap_function_that_raises(hosts: Any, api: Any) -> Any:
    def bootstrap() -> None:
        raise ValueError("cannot be set up")

    procs = hosts.slice(hosts=0).spawn_procs(bootstrap=bootstrap, name="unset")
    counters = procs.spawn("counters", Counter)
    return api.raised(lambda: procs.initialized.get(timeout=30)), api.raised(
        lambda: counters.value.call_one().get(timeout=30)
    )


def a_wrong_number_of_bindings(hosts: Any, api: Any) -> Any:
    return [
        api.raised(lambda: hosts.spawn_procs(per_host={"gpus": 2}, proc_bind=[{"cpus": "0"}])),
        api.raised(lambda: hosts.spawn_procs(proc_bind=[])),
        api.raised(lambda: hosts.spawn_procs(proc_bind=[{}, {}])),
    ]


def processes_bound_to_a_cpu(hosts: Any, api: Any) -> Any:
    cpu = str(min(os.sched_getaffinity(0)))
    procs = hosts.slice(hosts=0).spawn_procs(proc_bind=[{"cpus": cpu}], name="bound")
    return procs.spawn("reader", _environment(api)).cpus.call_one().get(timeout=30)


def a_bootstrap_command(hosts: Any, api: Any) -> Any:
    command = api.default_bootstrap_cmd().with_env({"LOOM_PARITY_VARIABLE": "from the command"})
    procs = hosts.slice(hosts=slice(1, 2)).spawn_procs(bootstrap_command=command, name="commanded")
    return procs.spawn("reader", _environment(api)).variable.call().get(timeout=30)


def a_bootstrap_command_for_each_point(hosts: Any, api: Any) -> Any:
    default = api.default_bootstrap_cmd()

    def command(point: Any) -> Any:
        return default.with_env({"LOOM_PARITY_VARIABLE": f"{point.rank} {dict(point)}"})

    part = hosts.slice(hosts=slice(1, 2))
    procs = part.spawn_procs(per_host={"gpus": 2}, bootstrap_command=command, name="commanded")
    return procs.spawn("reader", _environment(api)).variable.call().get(timeout=30)


def another_python(hosts: Any, api: Any) -> Any:
    folder = tempfile.mkdtemp()
    python = os.path.join(folder, "python")
    with open(python, "w") as script:
        script.write(f'#!/bin/sh\nLOOM_PARITY_VARIABLE=wrapped exec "{sys.executable}" "$@"\n')
    os.chmod(python, 0o755)
    sizes = []
    variables = []
    # The hosts remember it (torchmonarch 0.7): so the last one is the usual one again.
    for executable in (python, sys.executable):
        other = hosts.with_python_executable(executable)
        sizes.append((other.sizes, other.slice(hosts=1).sizes))
        procs = other.slice(hosts=1).spawn_procs(name="other_python")
        variables.append(procs.spawn("reader", _environment(api)).variable.call_one().get(timeout=30))
    shutil.rmtree(folder)
    return sizes, variables


def actors_on_slices_of_procs(hosts: Any, api: Any) -> Any:
    on_one = api.procs.slice(hosts=1, gpus=0).spawn("where", Where)
    on_half = api.procs.slice(gpus=1).spawn("where", Where)
    flat = api.procs.flatten("rank").spawn("where", Where)
    return [
        (on_one.sizes, on_one.rank.call_one().get(timeout=30), on_one.own_rank.call_one().get(timeout=30)),
        (on_half.sizes, on_half.rank.call().get(timeout=30), on_half.own_rank.call().get(timeout=30)),
        (flat.sizes, flat.rank.call().get(timeout=30), flat.slice(rank=2).own_rank.call_one().get(timeout=30)),
    ]


def two_meshes_of_one_name(hosts: Any, api: Any) -> Any:
    first = api.procs.spawn("twin", Counter, 1)
    second = api.procs.spawn("twin", Counter, 2)
    return first.value.call().get(timeout=30), second.value.call().get(timeout=30)


def keyword_arguments_of_a_constructor(hosts: Any, api: Any) -> Any:
    return api.procs.spawn("counters", Counter, start=4, step=3).step_on.call().get(timeout=30)
