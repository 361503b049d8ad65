"""A weaver that does not answer yet: nothing that the client asks waits for it, and the processes still find it."""

from __future__ import annotations

import os
import signal
import time

import pytest

import loom
from loom import Actor, endpoint
from loom.control.address import ADDRESS_VARIABLE
from loom.wire.bodies import AskWeaver
from loom_gateway.driver.weaver_link import FIRST_WEAVER
from loom_gateway.sessions.driver_files import DriverFiles
from loom_proxy.local import LocalCluster
from tests.support.gateways import BOUND, gateway_of

pytestmark = pytest.mark.timeout(120)


class Curious(Actor):
    """Says what its process was told."""

    @endpoint  # type: ignore[untyped-decorator]
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


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
        told = procs.spawn("curious", Curious).variable.call(ADDRESS_VARIABLE).get(BOUND)

        assert set(told.values()) == {address}


def test_processes_start_without_a_weaver_that_does_not_answer_in_time(cluster: LocalCluster) -> None:
    with gateway_of(cluster) as gateway, gateway.connect() as job:
        job.weaver.address()
        pid = DriverFiles(str(gateway.state / "weaver" / "weaver")).read_record().pid
        os.kill(pid, signal.SIGSTOP)
        try:
            actors = job.hosts.spawn_procs(name="procs").spawn("curious", Curious)
            told = actors.variable.call(ADDRESS_VARIABLE).get(BOUND)
        finally:
            os.kill(pid, signal.SIGCONT)

        assert set(told.values()) == {None}


def test_a_client_asks_the_weaver_through_its_session(cluster: LocalCluster) -> None:
    with gateway_of(cluster) as gateway, gateway.connect() as job:
        address = job.weaver.address()

        assert job._calls.ask(AskWeaver("address", {}, BOUND)).get(BOUND) == address
        with pytest.raises(loom.WrongArguments, match="knows no operation 'fly'"):
            job._calls.ask(AskWeaver("fly", {}, BOUND)).get(BOUND)


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
