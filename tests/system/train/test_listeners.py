"""SECURITY.md names every socket on which the processes of a `loom.local` listen, also while they train."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import psutil
import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.support.listeners import Listener, listeners, unnamed
from tests.support.processes import tree
from tests.system.train.trainers import Watched, a_job


@pytest.fixture
def local() -> Iterator[LocalCluster]:
    with LocalCluster(hosts=2) as running:
        yield running


def of_this_test() -> list[Listener]:
    """What the children of this process listen on."""
    return list(listeners(tree(psutil.Process().pid)[1:]))


@pytest.mark.guarantees(
    "ports",
    "Every socket on which a process of Loom listens is named in `SECURITY.md`, and none listens on every address",
)
@pytest.mark.slow
def test_every_listening_socket_of_a_training_is_named(local: LocalCluster) -> None:
    with loom.connect(local.url, local.token) as job:
        watched = Watched(job, a_job(steps=100_000))
        watched.await_steps()
        found = of_this_test()
        watched.stop()

    assert {"loom_gateway", "loom_gateway.driver", "loom.weaver", "loom_gateway.workers.host"} <= {
        one.process for one in found
    }
    trains = [one for one in found if one.process == "monarch._src.actor.bootstrap_main" and one.kind == "TCP"]
    assert len(trains) >= 2 * 3  # of each group a store, a manager and the state
    assert unnamed(found) == [], found


def test_a_socket_that_is_not_named_is_found() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        found = list(listeners([psutil.Process()]))
        wrong = unnamed(found)

        port = server.getsockname()[1]
        assert any(f"TCP 0.0.0.0 {port}, which SECURITY.md does not name" in line for line in wrong)
        assert any(f"listens on every address: 0.0.0.0 {port}" in line for line in wrong)
