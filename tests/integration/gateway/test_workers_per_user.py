"""Workers of each user's own: what sessions of two users see, and what becomes of a third."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import loom
from loom.token_file import TokenFile
from loom_proxy.local import LocalCluster
from tests.support.gateways import BOUND, Gateway, await_end
from tests.support.processes import run_loom

OPTIONS = ("--workers-per-user", "1", "--workers-timeout", "1")

pytestmark = pytest.mark.timeout(180)


class Place(loom.Actor):
    @loom.endpoint
    def parent(self) -> int:
        return os.getppid()


class GatewayOfUsers(Gateway):
    users: dict[str, str]
    """Their tokens, by name."""


@pytest.fixture
def gateway(cluster: LocalCluster, tmp_path: Path) -> Iterator[GatewayOfUsers]:
    tokens = tmp_path / "tokens.json"
    gateway = GatewayOfUsers(cluster.workers, *OPTIONS, "--tokens", str(tokens))
    gateway.users = {
        user: TokenFile(tokens).create(user, "drive", user=user)[1] for user in ("ann", "bob", "carol")
    }
    try:
        gateway.start()
        yield gateway
    finally:
        gateway.close()


def connect(gateway: GatewayOfUsers, user: str, session: str | None = None) -> loom.Job:
    return loom.connect(gateway.url, gateway.users[user], session, take_over=session is not None)


def parents(job: loom.Job) -> set[int]:
    """The processes of the worker hosts on which a session's processes run."""
    return set(job.hosts.spawn_procs().spawn("places", Place).parent.call().get(BOUND).values())


@pytest.mark.guarantees("drivers", "With `--workers-per-user`, processes of two users are never on one host")
def test_users_have_hosts_of_their_own_and_a_users_sessions_the_same(gateway: GatewayOfUsers) -> None:
    with connect(gateway, "ann") as first, connect(gateway, "ann") as second, connect(gateway, "bob") as other:
        found = [parents(job) for job in (first, second, other)]
        assert [len(job.state().workers) for job in (first, second, other)] == [1, 1, 1]

    assert found[0] == found[1]
    assert len(found[0]) == len(found[2]) == 1
    assert not found[0] & found[2]


@pytest.mark.guarantees("drivers", "A user without free workers waits, and is told without naming others")
def test_a_user_without_free_workers_waits_and_is_told(gateway: GatewayOfUsers) -> None:
    with connect(gateway, "ann"):
        bobs = connect(gateway, "bob")
        pid = gateway.session(bobs.session)["pid"]
        with pytest.raises(loom.WorkerUnreachable, match="gives each user 1 of its 2 workers") as refused:
            connect(gateway, "carol")
        assert not any(user in str(refused.value) for user in ("ann", "bob"))

        bobs.close()
        await_end(pid)
        with connect(gateway, "carol") as job:
            assert len(parents(job)) == 1


@pytest.mark.guarantees("drivers", "A lease of workers outlives the gateway")
@pytest.mark.slow
def test_a_lease_outlives_the_gateway(gateway: GatewayOfUsers) -> None:
    ann = connect(gateway, "ann")
    before = parents(ann)
    ann.detach()

    gateway.end(signal.SIGKILL)
    gateway.start()

    with connect(gateway, "bob") as bob, connect(gateway, "ann", ann.session) as again:
        assert not parents(bob) & before
        assert parents(again) == before


@pytest.mark.guarantees("drivers", "`loom status` and REST say which isolation is in force")
def test_status_says_which_isolation_is_in_force(gateway: GatewayOfUsers, cluster: LocalCluster) -> None:
    assert gateway.rest("/status")["isolation"] == {"drivers": "none", "workers": "per user"}

    environment = {**os.environ, "LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token, "COLUMNS": "200"}
    said = run_loom("status", env=environment).stdout
    assert "isolation of drivers: none, all have the gateway's user id; workers: shared by all users" in said
