"""Where a gateway's workers are found, and which number each has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from loom.errors import InvalidAddress, WorkerUnreachable
from loom_gateway.workers import sources
from loom_gateway.workers.sources import (
    DnsWorkers,
    FileWorkers,
    FoundWorker,
    StaticWorkers,
    WorkerHosts,
    WorkerList,
    WorkerPod,
    parse_source,
)


class Found:
    """A source whose workers come and go."""

    where = " in the yard"
    advice = "Look there"

    def __init__(self, count: int, *found: FoundWorker) -> None:
        self.count = count
        self.found = list(found)

    def find(self) -> Sequence[FoundWorker]:
        return self.found


def at(*addresses: str) -> list[FoundWorker]:
    return [FoundWorker(address) for address in addresses]


def numbered(**addresses: int) -> list[FoundWorker]:
    return [FoundWorker(address, place) for address, place in addresses.items()]


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("tcp://10.0.0.5:26600", ("workers", StaticWorkers(("tcp://10.0.0.5:26600",)))),
        ("loaders=tcp://[fd00::5]:26600", ("loaders", StaticWorkers(("tcp://[fd00::5]:26600",)))),
        ("dns://loom.ns.svc:1234?count=3", ("workers", DnsWorkers("loom.ns.svc", 1234, 3))),
        ("gpus=dns://loom.ns.svc?count=1", ("gpus", DnsWorkers("loom.ns.svc", 26600, 1))),
        ("file:/etc/loom/workers", ("workers", FileWorkers(Path("/etc/loom/workers")))),
        ("gpus=file:///etc/a=b", ("gpus", FileWorkers(Path("/etc/a=b")))),
    ],
)
def test_a_source_is_read(text: str, source: object) -> None:
    assert parse_source(text) == source


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("10.0.0.5:26600", "names no place of processes: write tcp://HOST:PORT"),
        ("tcp://10.0.0.5", "is not a worker address"),
        ("dns://loom", r"write dns://SERVICE:PORT\?count=N"),
        ("dns://loom?count=0", "count is 1 at least"),
        ("dns://loom?count=many", r"write dns://SERVICE:PORT\?count=N"),
        ("dns://loom:99999?count=1", r"write dns://SERVICE:PORT\?count=N"),
        ("dns://loom?count=1&size=2", r"write dns://SERVICE:PORT\?count=N"),
        ("dns://?count=1", r"write dns://SERVICE:PORT\?count=N"),
        ("my-gpus=tcp://10.0.0.5:26600", "'my-gpus' cannot name a mesh"),
        ("=tcp://10.0.0.5:26600", "'' cannot name a mesh"),
        ("_gpus=tcp://10.0.0.5:26600", "'_gpus' cannot name a mesh"),
    ],
)
def test_what_is_no_source_is_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidAddress, match=why):
        parse_source(text)


def test_hosts_of_one_mesh_are_together_in_the_order_given() -> None:
    given = ["gpus=tcp://a:1", "loaders=tcp://b:1", "gpus=tcp://c:1"]

    hosts = WorkerHosts([parse_source(text) for text in given])
    hosts.look()

    assert hosts.addresses == ["tcp://a:1", "tcp://c:1", "tcp://b:1"]
    assert hosts.meshes == {"gpus": [0, 1], "loaders": [2]}
    assert not hosts.changing


def test_a_worker_that_is_given_twice_is_refused() -> None:
    with pytest.raises(InvalidAddress, match="tcp://a:1 is given more than once"):
        WorkerHosts([parse_source("tcp://a:1"), parse_source("loaders=tcp://a:1")])


def test_hosts_have_the_ordinals_of_their_pods() -> None:
    source = Found(3, *numbered(c=2, a=0))
    hosts = WorkerHosts([("workers", source)])
    hosts.look()
    missing = hosts.complete

    source.found = numbered(a=0, b=1, c=2)
    hosts.look()

    assert (missing, hosts.complete) == (False, True)
    assert hosts.addresses == ["a", "b", "c"]


def test_a_pod_that_is_replaced_keeps_its_number() -> None:
    source = Found(3, *numbered(a=0, b=1, c=2))
    hosts = WorkerHosts([("workers", source)])
    hosts.look()

    source.found = numbered(a=0, c=2)
    assert not hosts.look()
    assert hosts.complete
    source.found = numbered(z=1, a=0, c=2)
    assert hosts.look()

    assert hosts.addresses == ["a", "z", "c"]


def test_without_ordinals_addresses_that_stay_keep_their_numbers() -> None:
    source = Found(3, *at("b", "d"))
    hosts = WorkerHosts([("workers", source)])
    hosts.look()
    source.found = at("a", "b", "d")
    hosts.look()
    first = hosts.addresses

    source.found = at("a", "b", "c", "d")  # the new one is there before the old one is gone
    hosts.look()
    during = hosts.addresses
    source.found = at("a", "c", "d")
    hosts.look()

    assert first == during == ["a", "b", "d"]
    assert hosts.addresses == ["a", "c", "d"]


def test_the_error_says_which_workers_are_missing() -> None:
    hosts = WorkerHosts([("workers", Found(3, *numbered(a=0, c=2))), ("loaders", Found(1))])
    hosts.look()

    with pytest.raises(WorkerUnreachable) as error:
        hosts.check_complete()

    assert "2 of 3 workers of workers have been found in the yard (a, c); missing: number 1" in str(error.value)
    assert "0 of 1 workers of loaders have been found in the yard (none); missing: number 0" in str(error.value)
    assert str(error.value).count("Look there") == 1


def test_a_file_lists_workers_and_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text("# the rack on the left\ntcp://a:1\n\ntcp://b:1  # its last day\n")
    hosts = WorkerHosts([parse_source(f"file:{path}")])
    hosts.look()
    before = hosts.addresses

    path.write_text("tcp://a:1\ntcp://c:1\n")
    changed = hosts.look()

    assert before == ["tcp://a:1", "tcp://b:1"]
    assert changed
    assert hosts.addresses == ["tcp://a:1", "tcp://c:1"]


def test_a_worker_keeps_its_number_when_a_line_above_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text("tcp://a:1\ntcp://b:1\n")
    hosts = WorkerHosts([parse_source(f"file:{path}")])
    hosts.look()

    path.write_text("tcp://b:1\n")
    changed = hosts.look()
    after = hosts.addresses
    path.write_text("tcp://b:1\ntcp://c:1\n")
    hosts.look()

    assert not changed
    assert after == ["tcp://a:1", "tcp://b:1"]
    assert hosts.addresses == ["tcp://c:1", "tcp://b:1"]


def test_a_file_that_grows_adds_hosts_behind_those_there_are(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text("tcp://b:1\n")
    hosts = WorkerHosts([parse_source(f"file:{path}")])
    hosts.look()

    path.write_text("tcp://a:1\ntcp://b:1\n")
    hosts.look()

    assert hosts.addresses == ["tcp://b:1", "tcp://a:1"]


def test_a_mesh_before_another_does_not_grow(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text("tcp://a:1\n")
    hosts = WorkerHosts([parse_source(f"gpus=file:{path}"), parse_source("loaders=tcp://l:1")])
    hosts.look()

    path.write_text("tcp://a:1\ntcp://b:1\n")
    hosts.look()

    assert hosts.addresses == ["tcp://a:1", "tcp://l:1"]
    assert hosts.meshes == {"gpus": [0], "loaders": [1]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: .*No such file"),
        ("10.0.0.5", "'10.0.0.5' is not a worker address"),
        (b"\xff", "cannot be read"),
        ("tcp://a:1\ntcp://a:1", "tcp://a:1 is given more than once"),
    ],
)
def test_a_file_that_is_none_of_workers_is_an_error(tmp_path: Path, content: str | bytes | None, why: str) -> None:
    path = tmp_path / "workers"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    with pytest.raises(WorkerUnreachable, match=f"the file of workers {path}.*{why}"):
        WorkerHosts([parse_source(f"file:{path}")]).look()


def test_an_empty_file_has_no_workers_yet(tmp_path: Path) -> None:
    (tmp_path / "workers").write_text("# none\n")
    hosts = WorkerHosts([parse_source(f"file:{tmp_path}/workers")])

    hosts.look()

    assert not hosts.complete
    with pytest.raises(WorkerUnreachable, match="0 of 1 workers"):
        hosts.check_complete()


def test_what_to_do_about_missing_workers_fits_where_they_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "workers").write_text("# none\n")

    in_file, in_dns, in_both = (
        missing(*sources)
        for sources in (
            [f"file:{tmp_path}/workers"],
            ["dns://loom.ns.svc?count=2"],
            [f"file:{tmp_path}/workers", "loaders=dns://loom.ns.svc?count=2", "more=dns://other.ns.svc?count=1"],
        )
    )

    look_in_file = f"Write the address of each into {tmp_path}/workers, a line each"
    assert f"0 of 1 workers of workers have been found in the file {tmp_path}/workers (none)" in in_file
    assert look_in_file in in_file
    assert "kubectl" not in in_file
    assert "have been found at loom.ns.svc (none)" in in_dns
    assert in_dns.endswith(". See why their pods are not ready, with `kubectl get pods` and `kubectl describe pod`")
    assert "file" not in in_dns
    assert look_in_file in in_both
    assert in_both.count("kubectl describe pod") == 1


def missing(*sources: str) -> str:
    """What is said of workers none of which have been found."""
    with pytest.raises(WorkerUnreachable) as error:
        WorkerHosts([parse_source(text) for text in sources]).check_complete()
    return str(error.value)


def pods(*ordinals: int | None) -> list[WorkerPod]:
    return [
        WorkerPod(f"10.0.0.{place if number is None else number}", number) for place, number in enumerate(ordinals)
    ]


def test_further_pods_of_a_stateful_set_join_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    behind = pods(0, 1)
    monkeypatch.setattr(sources, "resolve_pods", lambda service: behind)
    hosts = WorkerHosts([parse_source("dns://loom.ns.svc:1?count=2")])
    hosts.look()

    behind = pods(0, 1, 3)  # number 2 is not ready yet
    before = hosts.look(), hosts.complete
    behind = pods(0, 1, 2, 3)
    hosts.look()
    behind = pods(1, 2, 3, 4)  # number 0 is replaced
    hosts.look()

    assert before == (False, True)
    assert hosts.addresses == [f"tcp://10.0.0.{number}:1" for number in range(5)]
    behind = pods(0, 1)
    assert not hosts.look(), "the places of pods that are gone are kept"


def test_pods_that_a_deployment_starts_before_others_end_do_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "resolve_pods", lambda service: pods(None, None, None))
    hosts = WorkerHosts([parse_source("dns://loom.ns.svc:1?count=2")])
    hosts.look()

    assert len(hosts.addresses) == 2


def test_a_stateful_set_may_number_its_pods_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "resolve_pods", lambda service: pods(7, 8))
    hosts = WorkerHosts([parse_source("dns://loom.ns.svc:1?count=2")])
    hosts.look()

    assert hosts.addresses == ["tcp://10.0.0.7:1", "tcp://10.0.0.8:1"]


def test_a_service_that_no_dns_knows_is_an_error() -> None:
    with pytest.raises(
        WorkerUnreachable, match=r"nothing\.invalid, the headless service of 3 workers, cannot be resolved"
    ):
        DnsWorkers("nothing.invalid", 26600, 3).find()


def test_the_next_gateway_goes_on_with_the_numbers_that_sessions_know() -> None:
    source = Found(2, *at("a", "b"))
    hosts = WorkerHosts([("workers", source)])
    hosts.look()
    source.found = at("b", "c")
    hosts.look()
    listed = hosts.listed()

    after = WorkerHosts([("workers", source)])
    after.take_over(listed)
    changed = after.look()

    assert hosts.addresses == after.addresses == ["c", "b"]
    assert not changed


def test_a_list_of_other_sources_is_not_taken_over() -> None:
    hosts = WorkerHosts([("workers", Found(2, *at("a", "b")))])

    hosts.take_over(WorkerList(["x", "y"], {"workers": [0, 1]}, [1, 1]))
    hosts.look()

    assert hosts.addresses == ["a", "b"]
