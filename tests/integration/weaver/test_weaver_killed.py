"""The weaver is killed while processes of a job train: they go on, and everything is there with the next one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from loom_gateway.sessions.state_dir import DriverFiles
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import BOUND, Gateway, await_true, gateway_of
from tests.support.weaver_actors import FIRST_RATE, Trainers, weight_after
from tests.support.weavers import await_another

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def gateway(cluster: LocalCluster) -> Iterator[Gateway]:
    with gateway_of(cluster) as running:
        yield running


@pytest.fixture
def trainers(gateway: Gateway) -> Iterator[Trainers]:
    with gateway.connect() as job:
        yield Trainers(job, "kept")


def kill_weaver(gateway: Gateway, weaver: WeaverProxy) -> None:
    """Kill the weaver, and wait until there is another one."""
    before = weaver.status()["weaver"]
    os.kill(DriverFiles(str(gateway.state / "weaver" / "weaver")).read_record().pid, signal.SIGKILL)

    await_another(weaver, before)


def test_training_goes_on_and_is_found_again_with_all_that_was_known(gateway: Gateway, trainers: Trainers) -> None:
    weaver = trainers.weaver
    first = weaver.update_config(trainers.glob, learning_rate=0.25).get(BOUND)
    weaver.set_policy("kept", "pause")
    devices, replicas = weaver.devices(), weaver.replicas()
    events = list(weaver.events(after=0))

    kill_weaver(gateway, weaver)

    assert list(weaver.events(after=0))[: len(events)] == events
    assert weaver.policies()["kept"] == "pause"
    again = weaver.devices()
    for uuid, device in devices.items():
        assert (again[uuid].server, again[uuid].type, again[uuid].memory) == (
            device.server,
            device.type,
            device.memory,
        )
        assert set(again[uuid].replicas) == set(device.replicas)
    for id in trainers.replicas:
        assert weaver.replica(id).config == {"learning_rate": 0.25}
        assert weaver.replica(id).devices == replicas[id].devices
        await_true(lambda id=id: weaver.replica(id).connected)  # type: ignore[misc]
        assert weaver.replica(id).registered == replicas[id].registered  # it has not begun anew
    second = weaver.update_config(trainers.glob, learning_rate=0.125).get(BOUND)
    trained = trainers.stop()
    await_true(lambda: {weaver.replica(id).state for id in trainers.replicas} == {"finished"})

    for id in trainers.replicas:
        # Each command was applied once, at the step that was acknowledged.
        assert (first[id].ok, second[id].ok) == (True, True)
        assert trained[id].calls == [(first[id].step, 0.25), (second[id].step, 0.125)]
        assert [rate for _, rate in trained[id].rates] == [FIRST_RATE, 0.25, 0.125]
        assert trained[id].weight == weight_after(trained[id])
        # Nothing is missing of the history: not what came before the kill, nor what was reported meanwhile.
        points = weaver.history(id, "weight", points=20_000)
        assert [point.step for point in points] == list(range(trained[id].steps))
        assert points[-1].value == trained[id].weight


@pytest.mark.slow
def test_a_command_that_was_not_acknowledged_is_given_by_the_next_weaver(
    gateway: Gateway, trainers: Trainers
) -> None:
    weaver, (one, other) = trainers.weaver, trainers.replicas
    os.kill(trainers.pids[0], signal.SIGSTOP)
    try:
        command = weaver.update_config(trainers.glob, learning_rate=0.25)
        await_true(lambda: command.outcomes()[other].ok)
        assert command.outcomes()[one].waiting

        kill_weaver(gateway, weaver)

        assert weaver.command_of(command.id).outcomes()[one].waiting
    finally:
        os.kill(trainers.pids[0], signal.SIGCONT)
    outcomes = command.get(BOUND)
    trained = trainers.stop()

    for id in trainers.replicas:
        assert outcomes[id].ok
        assert trained[id].calls == [(outcomes[id].step, 0.25)]
