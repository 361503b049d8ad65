"""The cluster of a running ``loom up``, which this user's other programs find by themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loom.errors import InvalidAddress, UnknownContext
from loom_proxy.contexts import ContextFile, GatewayContext, Origin, choose_gateway, find_gateway, named_gateway
from loom_proxy.running_cluster import announced, find_running


def test_a_running_cluster_is_found_until_it_ends(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = config / "up.json"
    with announced(path, "ws://127.0.0.1:1", "secret") as first:
        assert first
        found = choose_gateway()
        assert (found.url, found.token, found.origin) == ("ws://127.0.0.1:1", "secret", Origin.RUNNING)
        assert str(found) == "ws://127.0.0.1:1 (of the `loom up` on this machine)"
        assert path.stat().st_mode & 0o077 == 0

    assert find_gateway() is None
    with pytest.raises(InvalidAddress):
        choose_gateway()


def test_what_is_named_comes_before_it(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with announced(config / "up.json", "ws://127.0.0.1:1", "secret"):
        ContextFile().add(GatewayContext("prod", "wss://prod"), "t")
        assert choose_gateway().url == "wss://prod"
        monkeypatch.setenv("LOOM_URL", "ws://127.0.0.1:2")
        assert choose_gateway().url == "ws://127.0.0.1:2"


def test_the_first_of_two_stays(tmp_path: Path) -> None:
    path = tmp_path / "up.json"
    with announced(path, "ws://127.0.0.1:1", "a"):
        with announced(path, "ws://127.0.0.1:2", "b") as second:
            assert not second
        assert find_running(path) == ("ws://127.0.0.1:1", "a")


def test_what_a_killed_one_leaves_behind_is_none(tmp_path: Path) -> None:
    path = tmp_path / "up.json"
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom loom_proxy.running_cluster import announced\n"
        "with announced(Path(sys.argv[1]), 'ws://127.0.0.1:1', 'a'):\n    print(1, flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert find_running(path) == ("ws://127.0.0.1:1", "a")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    assert path.exists()
    assert find_running(path) is None
    with announced(path, "ws://127.0.0.1:2", "b") as again:
        assert again


def test_a_gateway_is_named_by_its_context_or_by_its_address(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ContextFile(config / "contexts.json").add(GatewayContext("prod", "wss://there", ca="ca.pem"), "of prod")
    for named in ("prod", "wss://there", "wss://there/"):
        found = named_gateway(named)
        assert (found.url, found.token, found.ca, found.context) == ("wss://there", "of prod", "ca.pem", "prod")
    with pytest.raises(UnknownContext, match="there are: prod"):
        named_gateway("test")

    with announced(config / "up.json", "ws://127.0.0.1:1", "of up"):
        assert named_gateway("ws://127.0.0.1:1/").token == "of up"
        assert named_gateway("ws://127.0.0.1:2").token is None
        monkeypatch.setenv("LOOM_TOKEN", "given")
        assert named_gateway("ws://127.0.0.1:1").token == "given"
        assert named_gateway("ws://127.0.0.1:2").token == "given"
        assert named_gateway("prod", "mine").token == "mine"
