"""Monarch's debugger from the laptop: breakpoints in endpoints, and who may talk about them."""

from __future__ import annotations

import json
import linecache
import os
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

import loom
from loom_proxy.debugger import Breakpoint
from loom_proxy.local import LocalCluster
from tests.support.gateways import BOUND, Gateway, await_true, gateway_of
from tests.support.processes import run_loom

pytestmark = pytest.mark.timeout(180)

PATH = "/nowhere/a_cell.py"

SOURCE = """
import loom

class Stopping(loom.Actor):
    @loom.endpoint
    def double(self, number):
        doubled = number * 2
        breakpoint()
        return doubled

    @loom.endpoint
    def fail(self, number):
        breakpoint()
        return number / 0
"""


CONTINUE = ["continue", "quit"]


@pytest.fixture
def actor_class() -> Iterator[Any]:
    """A class as a notebook has it: no file has its source."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SOURCE, PATH, "exec"), names)
    linecache.cache[PATH] = (len(SOURCE), None, SOURCE.splitlines(True), PATH)
    yield names["Stopping"]
    del linecache.cache[PATH]


@pytest.fixture
def gateway(cluster: LocalCluster) -> Iterator[Gateway]:
    with gateway_of(cluster) as running:
        yield running


def spawned(job: loom.Job, actor_class: Any) -> Any:
    return job.hosts.spawn_procs(name="procs").spawn("stopping", actor_class)


def both_stop(job: loom.Job) -> list[Breakpoint]:
    """Both actors in their breakpoints, once pdb has said where."""
    found: list[Breakpoint] = []

    def are_there() -> bool:
        found[:] = job.debugger.breakpoints()
        return len(found) == 2 and all(each.lineno is not None for each in found)

    await_true(are_there)
    return found


def talk(job: loom.Job, *lines: str) -> str:
    """What the debugger says while it is told some lines."""
    said: list[str] = []
    left = iter(lines)

    def read(prompt: str) -> str:
        said.append(prompt)
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    job.debugger.interact(read=read, write=said.append)
    return "".join(said)


def test_a_breakpoint_stops_each_rank_and_ranks_are_chosen(gateway: Gateway, actor_class: Any) -> None:
    with gateway.connect() as job:
        assert job.debugger.breakpoints() == []
        results = spawned(job, actor_class).double.call(4)

        found = both_stop(job)
        assert [(each.actor_name, each.rank, each.coords["hosts"]) for each in found] == [
            ("stopping", 0, 0),
            ("stopping", 1, 1),
        ]
        assert {(each.function, each.lineno) for each in found} == {("a_cell.double", 9)}
        assert {each.rank for each in job.debugger.wait(BOUND)} == {0, 1}
        said = talk(job, "attach stopping 1", "p doubled", "doubled = 5", "detach", "cast stopping ranks(1) c")
        assert f"> {PATH}(9)double()\n-> return doubled\n" in said
        assert "(Pdb) 8\n" in said
        await_true(lambda: [each.rank for each in job.debugger.breakpoints()] == [0])
        talk(job, *CONTINUE)

        assert list(results.get(BOUND).values()) == [8, 5]
        assert job.debugger.breakpoints() == []
        with pytest.raises(loom.WaitTimeout, match=r"no actor has stopped at a breakpoint within 0\.01 s"):
            job.debugger.wait(0.01)


def test_the_source_that_only_this_machine_has_is_shown(gateway: Gateway, actor_class: Any) -> None:
    with gateway.connect() as job:
        results = spawned(job, actor_class).double.call(4)
        both_stop(job)

        said = talk(job, "attach stopping 0", "ll", "n", "detach", *CONTINUE)

        assert (
            "  7  \t        doubled = number * 2\n  8  \t        breakpoint()\n  9  ->\t        return doubled\n"
            in said
        )
        assert "b64decode" not in said
        assert f"--Return--\n> {PATH}(9)double()->8\n-> return doubled\n" in said
        assert list(results.get(BOUND).values()) == [8, 8]


def test_an_exception_after_a_breakpoint_is_looked_at_where_it_was_raised(
    gateway: Gateway, actor_class: Any
) -> None:
    with gateway.connect() as job:
        results = spawned(job, actor_class).slice(hosts=0).fail.call(3)
        job.debugger.wait(BOUND)
        talk(job, *CONTINUE)
        job.debugger.wait(BOUND)

        said = talk(job, "attach stopping 0", "p number", "c", "quit")

        assert f"> {PATH}(14)fail()\n-> return number / 0\n" in said
        assert "(Pdb) 3\n" in said
        with pytest.raises(loom.ActorError, match=rf'File "{PATH}", line 14, in fail'):
            results.get(BOUND)


@pytest.mark.slow
def test_a_second_client_debugs_what_the_first_one_drives(
    gateway: Gateway, actor_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gateway.connect() as job:
        results = spawned(job, actor_class).double.call(4)
        both_stop(job)
        monkeypatch.setenv("LOOM_URL", gateway.url)
        monkeypatch.setenv("LOOM_TOKEN", job._connection.address.token)

        listed = run_loom("debug", "--json", "--wait", "10")
        assert [one["rank"] for one in json.loads(listed.stdout)["breakpoints"]] == [0, 1], listed.stderr
        assert "double" in run_loom("debug", "--list").stdout
        with loom.connect(gateway.url, session=job.session, mode="debug") as beside:
            with pytest.raises(loom.ReadOnlySession):
                beside.run(os.getpid)
            talk(beside, *CONTINUE)

        assert list(results.get(BOUND).values()) == [8, 8]
        with loom.connect(gateway.url, session=job.session, mode="watch") as watching:
            with pytest.raises(loom.ReadOnlySession):
                watching.debugger.breakpoints()
        assert job.run(lambda: "it is driven as before") == "it is driven as before"


def test_who_leaves_leaves_what_has_stopped_and_the_next_one_goes_on(gateway: Gateway, actor_class: Any) -> None:
    with gateway.connect() as job:
        results = spawned(job, actor_class).double.call(4)
        both_stop(job)
        attached, may_end = threading.Event(), threading.Event()
        said: list[str] = []

        def read(prompt: str) -> str:
            if not prompt.startswith("(Pdb)"):
                return "attach stopping 0"
            attached.set()
            assert may_end.wait(BOUND)
            return "p number"

        first = threading.Thread(target=lambda: job.debugger.interact(read=read, write=said.append))
        first.start()
        assert attached.wait(BOUND)

        second = talk(job, "attach stopping 0", "p number", "detach", *CONTINUE)
        may_end.set()
        first.join(BOUND)

        assert "(Pdb) 4\n" in second
        assert not first.is_alive()
        assert list(results.get(BOUND).values()) == [8, 8]


@pytest.mark.guarantees("users", "The debugger of a session has no port of its own")
def test_the_driver_opens_no_port_for_it(gateway: Gateway, actor_class: Any) -> None:
    with gateway.connect() as job:
        driver = psutil.Process(gateway.session(job.session)["pid"])
        before = listening(driver)
        results = spawned(job, actor_class).double.call(4)
        both_stop(job)

        assert listening(driver) == before

        def through_monarch() -> int:
            from monarch.actor import debug_controller

            return len(debug_controller().list.call_one(print_output=False).get())

        assert job.run(through_monarch) == 2
        talk(job, *CONTINUE)
        results.get(BOUND)


def listening(process: psutil.Process) -> set[int]:
    return {one.laddr.port for one in process.net_connections() if one.status == psutil.CONN_LISTEN}
