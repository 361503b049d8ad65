"""Two users of one gateway at once: each works at random, and tries every name, session and token of the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from loom_proxy.local import LocalCluster, free_ports
from tests.support.gateways import await_true
from tests.support.other_users import as_user, reachable_python
from tests.support.processes import read_json, start
from tests.support.two_users import Person
from tests.support.users import House

SECONDS = 300.0
"""How long the two users live together."""

LIMITS = ("--login-failures", "0", "--connection-rate", "0")
"""The wrong tokens and the requests of these tests would be too many."""

LOW = 1_500_000 + 256 * (os.getpid() % 4096)
"""The lowest user id of this run: of its workers, and from `LOW` + 16 on of its drivers."""


@pytest.fixture(scope="module")
def house(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    made = House(list(cluster.workers), tmp_path_factory.mktemp("two-users"), *LIMITS)
    yield made
    made.gateway.close()


@contextmanager
def workers_as(uids: list[int], folder: Path, python: list[str]) -> Iterator[list[str]]:
    """Workers with these user ids; their addresses."""
    started = []
    addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(len(uids))]
    try:
        for uid, address in zip(uids, addresses, strict=True):
            home = folder / f"home-{uid}-{address.rpartition(':')[2]}"
            home.mkdir()
            os.chown(home, uid, uid)
            places = {**os.environ, "HOME": str(home), "TMPDIR": str(home)}
            arguments = ["-m", "loom_gateway.workers.host", "--address", address, "--exit-with-parent"]
            started.append(start(*arguments, before=[*python, *as_user(uid)], cwd=home, env=places))
        for worker in started:
            read_json(worker)
        yield addresses
    finally:
        for worker in started:
            worker.communicate(timeout=60)


@pytest.fixture
def house_of(tmp_path: Path) -> Iterator[Callable[[bool], House]]:
    """Makes a gateway with two workers, whose user ids and drivers', if root runs this, are not the gateway's."""
    with ExitStack() as open_:

        def make(own_workers: bool) -> House:
            options = [*LIMITS, *(["--workers-per-user", "1"] if own_workers else [])]
            if os.geteuid() != 0:
                workers, python = list(open_.enter_context(LocalCluster(hosts=2)).workers), []
            else:
                folder = Path(open_.enter_context(short_folder()))
                python = open_.enter_context(reachable_python())
                uids = [LOW, LOW + 1] if own_workers else [LOW, LOW]
                workers = open_.enter_context(workers_as(uids, folder, python))
                options += ["--driver-uids", f"{LOW + 16}-{LOW + 255}"]
            made = House(workers, tmp_path, *options, before=python)
            open_.callback(made.gateway.close)
            return made

        yield make


@contextmanager
def short_folder() -> Iterator[str]:
    """A folder that every user id may enter, unlike pytest's."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="loom-test-") as folder:
        os.chmod(folder, 0o711)
        yield folder


def live_together(house: House, seed: int, seconds: float, **kind: bool) -> list[Person]:
    """Let two users work for so long. Raise what one of them saw or lost."""
    ann, bob = persons = [Person(house, user, seed, seconds, **kind) for user in ("ann", "bob")]
    ann.meet(bob)
    bob.meet(ann)
    for person in persons:
        person.begin()
    for person in persons:
        person.start()
    for person in persons:
        person.join(seconds + 120)
        assert not person.is_alive(), f"{person.user} hangs; done so far: {person.counts}"
    for person in persons:
        if person.failure is not None:
            raise person.failure
        person.end()
    return persons


def check_audit(house: House, persons: list[Person]) -> None:
    """Check that neither user has ever come into, or changed, a session of the other's."""
    for person, other in (persons, persons[::-1]):
        for line in house.audit(user=person.user):
            if line["event"] != "refused" and line.get("status", 200) < 300:
                assert line.get("session") not in other.names, line
                assert line.get("of", person.user) == person.user, line


@pytest.mark.guarantees(
    "users",
    "Two users who work at random, with replicas and groups of the same names, and try everything of each "
    "other's, see and change nothing",
)
@pytest.mark.guarantees(
    "users",
    "Two users who work at random for 5 minutes, with replicas and groups of the same names, and try "
    "every name, session, token, file and process of each other's, see and change nothing; on shared "
    "workers they reach each other's processes there, which is the documented limit",
)
def test_two_users_see_and_change_nothing_of_each_others(house: House) -> None:
    persons = live_together(house, seed=21, seconds=1.0, trains=False)

    assert all(person.counts for person in persons)
    check_audit(house, persons)


@pytest.mark.guarantees(
    "users",
    "Two users who work at random for 5 minutes, with replicas and groups of the same names, and try "
    "every name, session, token, file and process of each other's, see and change nothing; on shared "
    "workers they reach each other's processes there, which is the documented limit",
)
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 240)
@pytest.mark.parametrize("own_workers", [True, False], ids=["workers of their own", "shared workers"])
def test_two_users_see_and_change_nothing_of_each_others_for_minutes(
    house_of: Callable[[bool], House], own_workers: bool
) -> None:
    house = house_of(own_workers)
    persons = live_together(house, 22, SECONDS, own_ids=os.geteuid() == 0, own_workers=own_workers)

    for person in persons:
        assert set(person.counts) == person.all_actions, person.counts
        await_true(lambda: bool(house.audit(event="refused", user=person.user, code="unknown_session")))  # noqa: B023
    check_audit(house, persons)
