"""A weaver that is away, or does not answer yet: other work goes on, and processes find the weaver later."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

import loom
from loom import Actor, endpoint
from loom.control.address import ADDRESS_VARIABLE, parse_weaver_address, weaver_address
from loom.wire.bodies import AskWeaver
from loom_gateway.driver.weaver_link import FIRST_WEAVER
from loom_gateway.sessions.state_dir import DriverFiles
from loom_proxy.local import LocalCluster
from tests.support.gateways import BOUND, gateway_of

pytestmark = pytest.mark.timeout(120)


class Curious(Actor):
    """Says what its process was told."""

    @endpoint  # type: ignore[untyped-decorator]
    def weaver(self) -> str:
        return weaver_address()

    @endpoint  # type: ignore[untyped-decorator]
    def printed(self) -> str:
        return subprocess.run(["env"], capture_output=True, text=True, check=True).stdout


def test_a_spawn_holds_up_nothing_while_the_weaver_does_not_answer(cluster: LocalCluster) -> None:
    with gateway_of(cluster) as gateway, gateway.connect() as job:
        address = job.weaver.address()
        pid = DriverFiles(str(gateway.state / "weaver" / "weaver")).read_record().pid
        os.kill(pid, signal.SIGSTOP)
        try:
            before = time.monotonic()
            procs = job.hosts.spawn_procs(name="procs")
            assert job.run(len, "ab") == 2
            assert time.monotonic() - before < FIRST_WEAVER
        finally:
            os.kill(pid, signal.SIGCONT)
        told = procs.spawn("curious", Curious).weaver.call().get(BOUND)

        place, _, key = address.rpartition("/")
        assert {one.rpartition("/")[0] for one in told.values()} == {place}
        assert {one.rpartition("/")[2].split(":")[1] for one in told.values()} == {job.session}
        assert not {one.rpartition("/")[2] for one in told.values()} & {key}


@pytest.mark.slow
def test_processes_start_without_a_weaver_that_does_not_answer_in_time(cluster: LocalCluster) -> None:
    with gateway_of(cluster) as gateway, gateway.connect() as job:
        job.weaver.address()
        pid = DriverFiles(str(gateway.state / "weaver" / "weaver")).read_record().pid
        os.kill(pid, signal.SIGSTOP)
        try:
            actors = job.hosts.spawn_procs(name="procs").spawn("curious", Curious)
            told = actors.weaver.call().get(BOUND)
        finally:
            os.kill(pid, signal.SIGCONT)

        assert set(told.values()) == {""}


@pytest.mark.guarantees("weaver", "The weaver's key is not in a spawned process's environment")
def test_the_key_of_a_spawned_process_is_not_in_its_environment(cluster: LocalCluster) -> None:
    with gateway_of(cluster) as gateway, gateway.connect() as job:
        job.weaver.address()
        actors = job.hosts.spawn_procs(name="procs").spawn("curious", Curious)
        (address,) = set(actors.weaver.call().get(BOUND).values())

        assert parse_weaver_address(address).key
        for printed in actors.printed.call().get(BOUND).values():
            assert ADDRESS_VARIABLE not in printed
            assert parse_weaver_address(address).key not in printed


def test_a_client_asks_the_weaver_through_its_session(cluster: LocalCluster) -> None:
    with gateway_of(cluster) as gateway, gateway.connect() as job:
        place = job.weaver.address().rpartition("/")[0]

        asked: str = job._calls.ask(AskWeaver("address", {}, BOUND)).get(BOUND)
        assert asked.startswith(f"{place}/admin:{job.session}:")
        with pytest.raises(loom.WrongArguments, match="knows no operation 'fly'"):
            job._calls.ask(AskWeaver("fly", {}, BOUND)).get(BOUND)


def test_a_question_of_a_session_waits_for_the_next_weaver(cluster: LocalCluster) -> None:
    with gateway_of(cluster) as gateway, gateway.connect() as job:
        instance = job.weaver.status()["weaver"]
        os.kill(DriverFiles(str(gateway.state / "weaver" / "weaver")).read_record().pid, signal.SIGKILL)
        assert job.weaver.status()["weaver"] != instance


def test_a_question_to_a_weaver_that_does_not_answer_fails_in_time(cluster: LocalCluster) -> None:
    with gateway_of(cluster) as gateway, gateway.connect() as job:
        job.weaver.address()
        pid = DriverFiles(str(gateway.state / "weaver" / "weaver")).read_record().pid
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(loom.WeaverUnavailable, match=r"did not answer within 0\.2 s"):
                job._calls.ask(AskWeaver("status", {}, 0.2)).get(BOUND)
        finally:
            os.kill(pid, signal.SIGCONT)
