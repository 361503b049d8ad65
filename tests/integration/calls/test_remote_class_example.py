"""``examples/remote_class.py``, run as a newcomer runs it, on the cluster that the tests share."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from loom_proxy.local import LocalCluster
from tests.support.paths import EXAMPLES

EXAMPLE = EXAMPLES / "remote_class.py"


def test_an_ordinary_class_and_a_function_run_in_the_cluster(cluster: LocalCluster) -> None:
    ended = subprocess.run(
        [sys.executable, EXAMPLE],
        env={**os.environ, "LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token or ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert ended.returncode == 0, ended.stderr
    assert "refused: there is nothing to take the mean of" in ended.stdout
    assert "mean: 3.0\nthen: 4.0\n" in ended.stdout
    assert "at once: [3.25, 3.0, 3.0]" in ended.stdout
    places = re.findall(r"host (\d): process (\d+) of ", ended.stdout)
    assert [host for host, _ in places] == ["0", "1"]
    assert len({process for _, process in places}) == 2
