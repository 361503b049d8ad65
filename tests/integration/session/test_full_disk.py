"""The gateway's disk is full for a while: sessions and the weaver go on, and say what is missing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.support.gateways import Gateway, await_true
from tests.support.other_users import as_root
from tests.support.weavers import await_weaver

pytestmark = [as_root, pytest.mark.slow, pytest.mark.timeout(180)]

SIZE = 16 << 20  # bytes of the disk


@pytest.fixture
def gateway(cluster: LocalCluster) -> Iterator[Gateway]:
    """A gateway with a disk of its own."""
    gateway = Gateway(cluster.workers)
    gateway.state.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={SIZE},mode=700", "loom-test", str(gateway.state)]
    if subprocess.run(["mount", *options], check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        gateway.start()
        yield gateway
        gateway.end(15)
    finally:
        subprocess.run(["umount", "--lazy", str(gateway.state)], check=True)


def fill(folder: Path) -> Path:
    """Write into a folder until its disk is full; return the file."""
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("ab", buffering=0) as file:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass
    return ballast


def give_policies(job: loom.Job) -> None:
    """Give policies until one is refused."""
    while job.weaver.set_policy("train", "pause"):
        pass


@pytest.mark.guarantees(
    "disk and clock",
    "A full disk ends no weaver: it refuses commands with the reason, answers questions, and stores what "
    "was reported once there is room",
)
def test_a_full_disk_is_survived_and_told(gateway: Gateway) -> None:
    def talk(lines: int) -> str:
        import sys

        for number in range(lines):
            print("said", number)
            print("said", number, file=sys.stderr, flush=True)
            for descriptor in (1, 2):
                assert os.write(descriptor, b"said\n") == os.writev(descriptor, [b"sa", b"id\n"]) == 5
        return "said everything"

    with gateway.connect() as job:
        await_weaver(job.weaver)
        assert job.run(talk, 10) == "said everything"
        weaver = gateway.weavers()[0].pid
        ballast = fill(gateway.state)

        assert job.run(talk, 3000) == "said everything"
        with pytest.raises(loom.LoomError, match=r"no answer|was not done"):  # the first one waits to be stored
            give_policies(job)
        with pytest.raises(loom.Unavailable, match="was not done: the weaver could store nothing"):
            job.weaver.set_policy("train", "pause")
        status = job.weaver.status()
        assert status["undurable_since"] is not None

        ballast.unlink()
        await_true(lambda: job.weaver.status()["undurable_since"] is None)
        assert job.run(talk, 1) == "said everything"
        logs = gateway.state.glob("driver-*.log")
        await_true(lambda: any("lines are missing here" in path.read_text(errors="replace") for path in logs))
        assert [each.pid for each in gateway.weavers()] == [weaver]
        assert [event.kind for event in job.weaver.events(kind="undurable")] == ["undurable"]
    assert os.path.exists(gateway.state)
