"""A gateway that has to write down what it does, and cannot."""

from __future__ import annotations

import json
import shutil
import urllib.error
from pathlib import Path
from typing import Any

import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter
from tests.support.gateways import await_true, gateway_of

BOUND = 30.0


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]


@pytest.mark.guarantees(
    "nothing lost",
    "What a required audit cannot write down is refused, `/readyz` says why, and open sessions go on",
)
def test_what_cannot_be_written_down_is_refused_and_sessions_go_on(cluster: LocalCluster, tmp_path: Path) -> None:
    folder = tmp_path / "audit"
    folder.mkdir()
    # A file that takes one line makes the next one need a new file.
    options = ["--audit", str(folder / "audit"), "--audit-size", "1", "--audit-required"]
    with gateway_of(cluster, *options) as gateway:
        job = gateway.connect()
        counter = job.hosts.slice(hosts=0).spawn_procs().spawn("counters", Counter)
        assert "asked" in [event["event"] for event in events(folder)]
        shutil.rmtree(folder)

        with pytest.raises(loom.AuditUnavailable, match="--audit-required"):
            gateway.connect()
        with pytest.raises(urllib.error.HTTPError) as refused:
            gateway.rest(f"/sessions/{job.session}", "DELETE")
        assert refused.value.code == 503
        status, answer = gateway.ready()
        assert status == 503
        assert answer["reason"].startswith("the audit cannot be written: ")
        assert counter.add.call_one(1).get(BOUND) == 1

        folder.mkdir()
        await_true(lambda: gateway.ready()[0] == 200)
        gateway.connect().close()
        assert counter.add.call_one(1).get(BOUND) == 2
        gateway.rest(f"/sessions/{job.session}", "DELETE")
