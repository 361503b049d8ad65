"""Who may drive a session reaches its ranks, nobody else does, and the audit says who did what."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.support.gateways import BOUND, await_true
from tests.support.users import House


@pytest.fixture(scope="module")
def house(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    made = House(list(cluster.workers), tmp_path_factory.mktemp("users"))
    yield made
    made.gateway.close()


@pytest.fixture(scope="module")
def job(house: House) -> Iterator[loom.Job]:
    """A session of ann's, with processes."""
    with house.connect("ann") as opened:
        opened.hosts.spawn_procs(name="trainers")
        yield opened


@pytest.mark.guarantees(
    "users",
    "Who may drive a session debugs it and reaches its ranks, also beside its client, and the audit says "
    "who did what; a share for less does not",
)
def test_the_audit_names_who_did_what_on_which_rank(house: House, job: loom.Job, tmp_path: Path) -> None:
    procs = job.meshes["trainers"]
    (tmp_path / "here").touch()
    procs.exec(["echo", "two words"], 1).results(BOUND)
    procs.copy_to(tmp_path / "here", f"{tmp_path}/there", 1)
    procs.copy_from(f"{tmp_path}/there", tmp_path / "back", 0)
    procs.forward(6006, 1, local_port=0).close()

    about = {"event": "commanded", "user": "ann", "session": job.session, "mesh": "trainers"}
    await_true(lambda: house.audit(operation="forward", **about))
    lines = [(line["operation"], line["rank"], line["what"]) for line in house.audit(**about)]
    assert lines == [
        ("exec", "1", "echo 'two words'"),
        ("copy_to", "1", f"{tmp_path}/there"),
        ("copy_from", "0", f"{tmp_path}/there"),
        ("forward", "1", "6006"),
    ]


@pytest.mark.guarantees(
    "users",
    "Who may drive a session debugs it and reaches its ranks, also beside its client, and the audit says "
    "who did what; a share for less does not",
)
def test_only_who_may_drive_reaches_ranks(house: House, job: loom.Job) -> None:
    def reach() -> loom.Job:
        return house.connect("bob", job.session, mode="ranks")

    with pytest.raises(loom.UnknownSession):
        reach()
    job.share("bob", "operate")
    with pytest.raises(loom.ScopeError, match=r"'ann' shares session .* with you for operate"):
        reach()
    with house.watch("bob", job.session) as watching, pytest.raises(loom.ReadOnlySession):
        watching.meshes["trainers"].exec(["true"], 0)

    job.share("bob", "drive")
    with reach() as guest:
        (found,) = guest.meshes["trainers"].exec("echo $RANK", 1).results(BOUND)
        assert found.stdout == b"1\n"
        with pytest.raises(loom.ReadOnlySession):
            guest.run(len, "abc")

    await_true(lambda: house.audit(event="commanded", operation="exec", guest="bob", rank="1"))
    assert house.audit(event="reached", user="bob", session=job.session)
    job.unshare("bob")


@pytest.mark.slow
def test_what_cannot_be_written_down_is_not_done(house: House, job: loom.Job, tmp_path: Path) -> None:
    procs = job.meshes["trainers"]
    assert procs.exec(["true"]).results(BOUND)
    (weaver,) = house.gateway.weavers()
    weaver.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(loom.WeaverUnavailable):
            procs.exec(["touch", str(tmp_path / "done")], 0).results(BOUND)
        with pytest.raises(loom.WeaverUnavailable):
            procs.forward(6006, local_port=0)
    finally:
        weaver.send_signal(signal.SIGCONT)

    assert not (tmp_path / "done").exists()
    assert procs.exec(["true"]).results(BOUND)
