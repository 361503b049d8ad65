"""The hosts of a session: which are lost, and what a user of one is told."""

from __future__ import annotations

import pytest

from loom.errors import SupervisionError
from loom_gateway.driver.monarch.mesh_table import HostTable


def test_who_uses_a_lost_host_is_told_why_it_is_gone() -> None:
    hosts = HostTable(["tcp://a:1", "tcp://b:1", "tcp://c:1"])
    hosts.lose(1, "its worker has ended")
    hosts.move(1, "tcp://d:1")
    hosts.lose(2, "another worker is in its place")

    with pytest.raises(SupervisionError, match=r"^worker host 1 at tcp://d:1 \(its .* ended\) is gone: job.living"):
        hosts.check([0, 1])
    with pytest.raises(SupervisionError, match=r" and worker host 2 at tcp://c:1 \(another .* place\) are gone: "):
        hosts.check([0, 1, 2])
    hosts.check([0])
    hosts.lost.discard(1)
    hosts.check([1])
