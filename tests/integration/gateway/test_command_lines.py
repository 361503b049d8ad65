"""No process that a command has started shows a secret on its command line, nor does a log line."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import loom
from loom import Actor, endpoint
from loom_proxy.local import LocalCluster
from tests.support.gateways import BOUND
from tests.support.processes import read_json, start

TOKEN = f"token-{secrets.token_urlsafe(16)}"
MARK = secrets.token_hex(6)
"""What every secret begins with that a process of the test makes."""

MARKED_SECRETS = f"""
import secrets
urlsafe, hexadecimal = secrets.token_urlsafe, secrets.token_hex
secrets.token_urlsafe = lambda count=32: "{MARK}" + urlsafe(count)
secrets.token_hex = lambda count=32: hexadecimal(count) if count < 16 else "{MARK}" + hexadecimal(count - 6)
"""

LOOM = ["-c", "import sys; from loom.cli import main; main()"]


@contextmanager
def command_lines(*ignored: int) -> Iterator[list[str]]:
    """Yield the command lines with a secret that were seen, of all processes of the machine but some."""
    found: list[str] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            for name in os.listdir("/proc"):
                if not name.isdigit() or int(name) in ignored:
                    continue
                try:
                    line = Path("/proc", name, "cmdline").read_bytes().decode(errors="replace")
                except OSError:  # it has ended
                    continue
                if TOKEN in line or MARK in line:
                    found.append(line)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield found
    over.set()
    thread.join()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment whose Python programs make secrets that are known again."""
    (tmp_path / "sitecustomize.py").write_text(MARKED_SECRETS)
    return {**os.environ, "PYTHONPATH": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}


class Where(Actor):
    @endpoint
    def where(self) -> int:
        return os.getpid()


@pytest.mark.guarantees(
    "laptop", "A token or password in an argument is overwritten as soon as the program has started"
)
@pytest.mark.slow
def test_a_gateway_with_its_token_on_its_command_line_shows_it_no_more(tmp_path: Path) -> None:
    serve = [*LOOM, "serve", "gateway", "--worker", "tcp://127.0.0.1:1"]
    gateway = start(*serve, "--port", "0", "--token", TOKEN, "--state-dir", str(tmp_path / "state"))
    try:
        read_json(gateway)
        with command_lines() as found:
            threading.Event().wait(3.0)
        assert found == []
    finally:
        gateway.terminate()
        gateway.communicate(timeout=30)


@pytest.mark.slow
def test_no_command_with_a_session_shows_a_secret(environment: dict[str, str], tmp_path: Path) -> None:
    with command_lines() as found:
        environment |= {"LOOM_TOKEN": TOKEN, "BROWSER": "/bin/true"}
        up = start(*LOOM, "up", "--hosts", "2", "--port", "0", env=environment)
        try:
            assert up.stdout is not None
            url = next(line.split("=", 1)[1].strip() for line in up.stdout if "LOOM_URL=" in line)
            environment["LOOM_URL"] = url
            with loom.connect(url, TOKEN) as job:
                use(job, environment, tmp_path)
        finally:
            up.send_signal(signal.SIGINT)
            up.communicate(timeout=BOUND)

    assert found == []


def use(job: loom.Job, environment: dict[str, str], folder: Path) -> None:
    """Use a session by all commands that start processes, here or there."""

    def run(*words: str, code: int = 0) -> None:
        ended = subprocess.run(
            [sys.executable, *LOOM, *words], env=environment, capture_output=True, text=True, timeout=BOUND
        )
        assert ended.returncode == code, (words, ended)

    actors = job.hosts.spawn_procs(per_host={"gpus": 1}, name="trainers").spawn("actors", Where)
    assert len(actors.where.call().get()) == 2
    assert job.run(subprocess.call, ["true"]) == 0
    (folder / "data").write_text("x")
    here = ["--session", job.session, "--mesh", "trainers"]
    run("exec", *here, "--", "true")
    run("cp", *here, str(folder / "data"), f"0:{folder}/copy")
    run("dashboard")
    for words in (["weaver"], ["status"], ["meshes", "--session", job.session], ["devices"]):
        run(*words)
    environment = {**environment, "LOOM_NATS_PASSWORD": TOKEN, "LOOM_NATS_TOKEN": TOKEN}
    lasting = (
        ["forward", *here, "0:9", "0"],
        ["bridge", "nats://127.0.0.1:1"],
        ["watch"],
        ["logs", "-f", *here[:2]],
    )
    started = [start(*LOOM, *words, env=environment) for words in lasting]
    threading.Event().wait(3.0)
    for process in started:
        process.kill()
        process.communicate(timeout=BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["demo", "--steps", "20", "--json"], ["demo", "rl", "--steps", "3", "--json"]])
def test_no_demo_shows_a_secret(words: list[str], environment: dict[str, str]) -> None:
    with command_lines() as found:
        demo = start(*LOOM, *words, env=environment)
        demo.communicate(timeout=300)

    assert demo.returncode in (0, 1)  # so few steps teach little
    assert found == []


def test_no_log_line_of_a_program_that_connects_has_its_token(
    cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        for transport in ("websocket", "http"):
            with loom.connect(cluster.url, cluster.token, transport=transport) as job:
                assert job.run(len, "abc") == 3

    assert cluster.token not in caplog.text


@pytest.mark.slow
def test_no_log_line_of_a_gateway_has_a_token(tmp_path: Path) -> None:
    serve = [*LOOM, "serve", "gateway", "--worker", "tcp://127.0.0.1:1", "--log-level", "debug"]
    with (tmp_path / "log").open("w") as log:
        state = ["--state-dir", str(tmp_path / "state")]
        gateway = start(*serve, "--port", "0", *state, env={**os.environ, "LOOM_TOKEN": TOKEN}, stderr=log)
    try:
        with pytest.raises(loom.LoomError):
            loom.connect(read_json(gateway)["url"], TOKEN)
    finally:
        gateway.terminate()
        gateway.communicate(timeout=30)

    assert "authorization: …" in (tmp_path / "log").read_text()
    assert TOKEN not in (tmp_path / "log").read_text()
