"""Everything but the workers is upgraded under sessions that work: nothing fails, no call is lost or doubled.

The old version is that of the commit LOOM_UPGRADE_FROM (by default HEAD), the new one is the checkout with the next
minor version of the protocol. LOOM_SESSIONS sessions work, by default 10.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import urllib.error
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from loom_proxy.local import LocalCluster
from tests.support.counting_laptop import KINDS, CountingLaptop
from tests.support.gateways import BOUND, await_true
from tests.support.session_hosts import HostedCluster
from tests.support.versions import Version

SESSIONS = int(os.environ.get("LOOM_SESSIONS", "10"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@contextmanager
def versions() -> Iterator[tuple[Version, Version]]:
    folder = Path(tempfile.mkdtemp(prefix="loom-test-"))
    try:
        yield Version.before(folder / "before"), Version.after(folder / "after")
    finally:
        shutil.rmtree(folder)


class Working:
    """Laptops whose sessions count, and what the weaver has of them."""

    def __init__(self, hosted: HostedCluster) -> None:
        self._hosted = hosted
        self._started: list[CountingLaptop] = []

    def begin(self, *versions: Version) -> list[CountingLaptop]:
        """A laptop of each version, all of which have had an answer."""
        laptops = []
        for version in versions:
            number = len(self._started)
            output = self._hosted.folder / f"laptop{number}.log"
            kind = list(KINDS)[number % len(KINDS)]
            laptops.append(CountingLaptop(self._hosted.url, kind, version.variables, output))
            self._started.append(laptops[-1])
        for laptop in laptops:
            laptop.await_begun()
        return laptops

    def _steps(self, laptop: CountingLaptop) -> list[float]:
        """The numbers that the weaver has of a laptop's counter; none while it is away, or knows of none."""
        replica = urllib.parse.quote(laptop.about["replica"], safe="")
        path = f"/api/v1/weaver/replicas/{replica}/metrics/n?points=20000"
        try:
            return [value for _, _, value in self._hosted.rest(path)["points"]]
        except urllib.error.HTTPError as error:
            if error.code not in (404, 422, 503):
                raise
            return []

    def go_on(self, laptops: Sequence[CountingLaptop]) -> None:
        """Wait until the weaver has heard of later steps of each."""
        before = [len(self._steps(laptop)) for laptop in laptops]
        for laptop, number in zip(laptops, before, strict=True):
            await_true(lambda laptop=laptop, number=number: len(self._steps(laptop)) > number + 5)

    def end(self, laptops: Sequence[CountingLaptop]) -> None:
        """Check that each has counted without a gap, and the weaver with it, and end their sessions."""
        for laptop in laptops:
            laptop.stop()
        for laptop in laptops:
            counted = list(range(1, len(laptop.answers) + 1))
            assert laptop.answers == counted, f"{laptop.kind}: {laptop.answers}"
            # A stream may have asked for one more.
            await_true(lambda laptop=laptop: len(self._steps(laptop)) >= len(laptop.answers))
            assert self._steps(laptop)[: len(counted)] == counted
            laptop.end()

    def close(self) -> None:
        for laptop in self._started:
            laptop.kill()


@pytest.mark.guarantees(
    "nothing lost",
    "Gateways, session hosts and the weaver are upgraded under sessions that work, and no call fails, is lost or "
    "doubled; sides of different minor versions of the protocol work together",
)
def test_everything_is_upgraded_while_sessions_work() -> None:
    with ExitStack() as stack:
        before, after = stack.enter_context(versions())
        cluster = stack.enter_context(LocalCluster(2, env=before.variables))
        listed = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loom-test-")), "hosts")
        listed.touch()
        hosted = stack.enter_context(
            HostedCluster(
                cluster.workers,
                host_options=["--drain", "600"],
                gateway_options=["--session-host", f"file:{listed}"],
                variables=before.variables,
            )
        )
        working = stack.enter_context(closing(Working(hosted)))
        laptops = working.begin(*[after if number == SESSIONS - 1 else before for number in range(SESSIONS)])
        assert {laptop.about["here"] for laptop in laptops} == {before.name, after.name}
        assert {laptop.about["there"] for laptop in laptops} == {before.name}

        hosted.weaver.upgrade(after.variables)
        working.go_on(laptops)

        old, hosted.variables = list(hosted.hosts), dict(after.variables)
        hosted.hosts += [hosted.host(f"host{number}").start() for number in (2, 3)]
        listed.write_text("".join(f"tcp://{host.address}\n" for host in hosted.hosts[2:]))
        for gateway in hosted.gateways:
            await_true(lambda gateway=gateway: not is_missed(hosted, gateway, hosted.hosts[2].address))
        for host in old:
            host.process.send_signal(signal.SIGTERM)
        await_true(lambda: opens_there(working, before, after))  # by a gateway of the old version

        for gateway in hosted.gateways:
            gateway.upgrade(after.variables)
            assert hosted.rest("/api/v1/status", gateway)["version"] == after.name
            working.go_on(laptops)
            working.end(working.begin(before, after))

        half = SESSIONS // 2
        working.end(laptops[:half])
        again = working.begin(*[before] * half)
        assert {laptop.about["there"] for laptop in again} == {after.name}
        working.go_on([*laptops[half:], *again])
        assert [host.process.poll() for host in old] == [None, None]
        working.end(laptops[half:])
        assert [host.process.wait(BOUND) for host in old] == [0, 0]
        working.go_on(again)
        working.end(again)

        for gateway in hosted.gateways:
            await_true(lambda gateway=gateway: not hosted.rest("/api/v1/sessions", gateway)["sessions"])
            assert hosted.rest("/readyz", gateway)["status"] == "ok"
            assert hosted.rest("/api/v1/status", gateway)["workers_missing"] == ""  # nor are the old session hosts
        waits = sorted((round(laptop.longest, 2), laptop.kind) for laptop in [*laptops, *again])
        print(f"longest waits for an answer, in seconds: {waits}")


def is_missed(hosted: HostedCluster, gateway: object, address: str) -> bool:
    return address in hosted.rest("/api/v1/status", gateway)["workers_missing"]


def opens_there(working: Working, of: Version, there: Version) -> bool:
    """Open a session with a laptop of one version; return whether its driver has the other one."""
    (laptop,) = working.begin(of)
    working.end([laptop])
    return laptop.about["there"] == there.name
