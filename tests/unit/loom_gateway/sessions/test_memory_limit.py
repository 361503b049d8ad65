"""The memory limit of a container, from the files of its control groups."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from loom.wire.mux import MAX_MESSAGE
from loom_gateway import server, starting
from loom_gateway.settings import GatewaySettings
from loom_gateway.starting import largest_message, memory_limit

V1 = "9:cpu,cpuacct:/kubepods/pod1\n4:memory:/kubepods/pod1\n"
V1_NONE = "9223372036854771712"


@pytest.mark.guarantees("strangers", "The largest message fits into the container's memory")
@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        pytest.param("0::/\n", {"memory.max": "1000"}, 1000, id="version 2, in a container"),
        pytest.param("0::/\n", {"memory.max": "max"}, None, id="version 2, without a limit"),
        pytest.param(
            "0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "500", "memory.max": "700"}, 500, id="a parent's"
        ),
        pytest.param("0::/../outside\n", {"memory.max": "1000"}, 1000, id="a path outside of the container"),
        pytest.param(V1, {"memory/memory.limit_in_bytes": "2000"}, 2000, id="version 1, in a container"),
        pytest.param(V1, {"memory/kubepods/pod1/memory.limit_in_bytes": "3000"}, 3000, id="version 1, on the host"),
        pytest.param(V1, {"memory/memory.limit_in_bytes": V1_NONE}, None, id="version 1, without a limit"),
        pytest.param("", {}, None, id="no groups"),
    ],
)
def test_the_limit_is_that_of_the_container(
    tmp_path: Path, groups: str, files: dict[str, str], limit: int | None
) -> None:
    (tmp_path / "cgroup").write_text(groups)
    for name, content in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")

    assert memory_limit(tmp_path / "cgroup", tmp_path / "fs") == limit


def test_another_system_has_none(tmp_path: Path) -> None:
    assert memory_limit(tmp_path / "nothing") is None


@pytest.mark.parametrize(("limit", "largest"), [(None, MAX_MESSAGE), (1 << 50, MAX_MESSAGE), (4 << 30, 1 << 30)])
def test_the_largest_message_is_a_quarter_of_it(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, largest: int
) -> None:
    monkeypatch.setattr(starting, "memory_limit", lambda: limit)

    assert largest_message() == largest


@pytest.mark.guarantees("strangers", "The largest message fits into the container's memory")
@pytest.mark.parametrize(("given", "told"), [(None, "4242"), (1000, "1000"), (0, str(MAX_MESSAGE))])
def test_drivers_are_told_the_limit_unless_another_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: int | None, told: str
) -> None:
    class Told(Exception):
        pass

    def manager(*arguments: object) -> None:
        raise Told(*arguments)

    monkeypatch.setattr(starting, "largest_message", lambda: 4242)
    monkeypatch.setattr(starting, "SessionManager", manager)
    settings = GatewaySettings(
        worker=["tcp://127.0.0.1:1"], port=0, max_message=given, tokens=tmp_path / "tokens", state_dir=str(tmp_path)
    )

    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(server, "listen", lambda *_: listener)
        with pytest.raises(Told) as caught:
            server.serve(settings)

    options = caught.value.args[4]
    assert options[options.index("--max-message") + 1] == told
