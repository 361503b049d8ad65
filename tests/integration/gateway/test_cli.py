"""The command ``loom``, run as a user runs it."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator

import psutil
import pytest

import loom
from loom.process.listen import free_ports
from loom_proxy.local import LocalCluster
from tests.support.processes import HIDDEN, LOOM, read_json, run, run_loom, start, still_there, tree


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(2, token="a secret") as cluster:
        yield cluster


@pytest.fixture
def environment(cluster: LocalCluster) -> dict[str, str]:
    """What ``loom up`` tells its user to export."""
    return {**os.environ, "LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token, "COLUMNS": "200"}


@pytest.fixture(scope="module")
def web_server() -> Iterator[str]:
    """A server that is no gateway."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"ws://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


# -- the command itself ---------------------------------------------------------------------------------------


def test_the_commands_load_nothing_heavy() -> None:
    heavy = ["monarch", "torch", "loom_proxy", "loom_gateway.server", "fastapi", "websockets", "cloudpickle"]

    ended = run("-c", "import sys, loom.cli.app; print([name for name in sys.modules if name in sys.argv])", *heavy)

    assert ended.stdout.strip() == "[]"


def test_help_names_every_command() -> None:
    ended = run("-c", LOOM, "--help")

    assert ended.returncode == 0
    assert {"up", "demo", "serve", "status", "sessions"} <= set(re.findall(r"\w+", ended.stdout))


def test_the_version_is_the_package_s() -> None:
    assert run("-c", LOOM, "--version").stdout == f"loom {loom.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        pytest.param(["status", "--no-such-option"], marks=pytest.mark.slow),
        ["serve", "worker"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert run_loom(*arguments).returncode == 2


# -- serve ------------------------------------------------------------------------------------------------------


def test_serve_worker_becomes_a_worker() -> None:
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    worker = start("-c", LOOM, "serve", "worker", "--address", address, "--exit-with-parent")

    assert read_json(worker) == {"event": "listening", "address": address, "pid": worker.pid}
    worker.send_signal(signal.SIGINT)
    assert worker.wait(10) == 0


def test_serve_gateway_becomes_a_gateway() -> None:
    options = ["--worker", f"tcp://127.0.0.1:{free_ports(1)[0]}", "--port", "0", "--token", "a secret"]
    gateway = start("-c", LOOM, "serve", "gateway", *options, "--exit-with-parent")

    announcement = read_json(gateway)

    assert announcement["pid"] == gateway.pid
    assert "token" not in announcement
    assert "a secret" not in psutil.Process(gateway.pid).cmdline()
    everything = tree(gateway.pid)
    gateway.terminate()
    assert still_there(everything) == []


def test_serve_reports_a_taken_port_with_exit_code_3() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run("-c", LOOM, "serve", "worker", "--address", f"tcp://127.0.0.1:{port}")

    assert ended.returncode == 3
    assert ended.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("monarch", ["serve", "worker", "--address", "tcp://127.0.0.1:26600"]),
        pytest.param("uvicorn", ["serve", "gateway", "--worker", "tcp://127.0.0.1:26600"], marks=pytest.mark.slow),
        ("fastapi", ["up"]),
    ],
)
def test_a_missing_extra_is_exit_code_4(module: str, arguments: list[str]) -> None:
    ended = run("-c", HIDDEN.format(module=module) + LOOM, *arguments)

    assert ended.returncode == 4
    assert re.fullmatch(r"error: .*not installed here: pip install 'monarch-loom\[gateway\]'\n", ended.stderr)


# -- up ---------------------------------------------------------------------------------------------------------


def test_up_says_how_to_connect_and_ends_with_ctrl_c() -> None:
    up = start("-c", LOOM, "up", "--port", "0", "--hosts", "2", env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert up.stdout
    said = dict[str, str]()
    while len(said) < 2:
        line = up.stdout.readline()
        assert line, "loom up ended before it said how to connect"
        said |= re.findall(r"export (\w+)=(\S+)", line)
    everything = tree(up.pid)

    status = run_loom("status", "--json", env={**os.environ, **said})

    assert len(json.loads(status.stdout)["workers"]) == 2
    up.send_signal(signal.SIGINT)
    assert up.wait(20) == 0
    assert still_there(everything, timeout=0) == []


def test_up_on_a_taken_port_is_exit_code_3() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run("-c", LOOM, "up", "--port", str(port))

    assert ended.returncode == 3
    assert str(port) in ended.stderr


# -- status and sessions ----------------------------------------------------------------------------------------


def test_status_shows_the_workers(environment: dict[str, str], cluster: LocalCluster) -> None:
    ended = run_loom("status", env=environment)

    assert ended.returncode == 0
    assert loom.__version__ in ended.stdout
    assert all(re.search(rf"{worker}\W+yes", ended.stdout) for worker in cluster.workers)


def test_status_can_be_read_by_a_program(environment: dict[str, str], cluster: LocalCluster) -> None:
    status = json.loads(run_loom("status", "--json", env=environment).stdout)

    assert status["version"] == loom.__version__
    assert status["workers"] == [{"address": worker, "reachable": True} for worker in cluster.workers]


def test_sessions_lists_a_session_and_ends_it(environment: dict[str, str], cluster: LocalCluster) -> None:
    job = loom.connect(cluster.url, cluster.token)

    table = run_loom("sessions", "list", env=environment).stdout
    (listed,) = json.loads(run_loom("sessions", "list", "--json", env=environment).stdout)["sessions"]
    ended = run_loom("sessions", "end", job.session, env=environment)

    assert re.search(rf"{job.session}\W+open\W+connected", table)
    assert listed["name"] == job.session
    assert ended.stdout == f"ended session {job.session}\n"
    assert json.loads(run_loom("sessions", "list", "--json", env=environment).stdout) == {"sessions": []}
    job.close()


def test_an_unknown_session_is_exit_code_8(environment: dict[str, str], cluster: LocalCluster) -> None:
    with loom.connect(cluster.url, cluster.token) as job:
        ended = run_loom("sessions", "end", "no such session", env=environment)

    assert ended.returncode == 8
    assert ended.stderr.startswith("error: no session named 'no such session'")
    assert job.session in ended.stderr


@pytest.mark.parametrize("token", ["wrong", ""])
def test_a_wrong_or_missing_token_is_exit_code_6(environment: dict[str, str], token: str) -> None:
    ended = run_loom("status", env=environment | {"LOOM_TOKEN": token})

    assert ended.returncode == 6
    assert "token" in ended.stderr


def test_a_gateway_that_does_not_answer_is_exit_code_5() -> None:
    ended = run_loom("status", "--url", f"ws://127.0.0.1:{free_ports(1)[0]}")

    assert ended.returncode == 5
    assert "Connection refused" in ended.stderr


def test_a_server_that_is_no_gateway_is_exit_code_5(web_server: str) -> None:
    ended = run_loom("status", "--url", web_server)

    assert ended.returncode == 5
    assert "is no Loom gateway" in ended.stderr


def test_a_wrong_url_is_exit_code_2() -> None:
    ended = run_loom("status", "--url", "127.0.0.1:8470")

    assert ended.returncode == 2
    assert "ws://HOST:PORT" in ended.stderr


def test_a_missing_url_is_exit_code_2() -> None:
    without = {name: value for name, value in os.environ.items() if name != "LOOM_URL"}

    ended = run_loom("status", env=without)

    assert ended.returncode == 2
    assert "LOOM_URL" in ended.stderr
