"""The weaver's process: what is there after it was killed, how it ends, and what it refuses to start with."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from loom.control.address import parse_weaver_address
from loom.token_file import ADMIN
from loom.weaver.keys import Keys
from loom.weaver.liveness import LivenessTimeouts
from tests.support.gateways import await_true
from tests.support.processes import read_json, start
from tests.unit.loom.weaver.raw_threadlet import (
    BOUND,
    Line,
    RawThreadlet,
    Refused,
    WeaverProcess,
    running_weaver,
)

SILENCE = LivenessTimeouts.beat * LivenessTimeouts.missed_beats


@pytest.mark.slow
def test_a_weaver_that_stood_still_gives_nobody_up(weaver: WeaverProcess) -> None:
    threadlet = RawThreadlet(weaver.address, pid=(1 << 22) + 1)  # a number that no process of this host has
    threadlet.welcome()
    os.kill(weaver.pid, signal.SIGSTOP)
    threadlet.send("beat", time.time(), 1, "step")
    time.sleep(1.5 * SILENCE)
    os.kill(weaver.pid, signal.SIGCONT)

    weaver.gateway().ask("command", kind="pause", target="train_0")

    threadlet.until(lambda frame: frame[0] == "command")


def test_a_weaver_that_is_killed_comes_back_with_everything(weaver: WeaverProcess, began: float) -> None:
    threadlet = RawThreadlet(weaver.address)
    gateway = weaver.gateway()
    last = [threadlet.report(step, at=began + step, loss=float(step)) for step in range(1, 200)][-1]
    threadlet.await_stored(last)
    gateway.ask("policy", group="train", action="pause")
    applied = gateway.ask("command", kind="update_config", params={"learning_rate": 0.5}, target="train_0")["id"]
    threadlet.command()
    threadlet.ack(applied, changes={"learning_rate": {"old": 0.001, "new": 0.5}})
    gateway.ask("command_state", id=applied, timeout=BOUND)
    waiting = gateway.ask("command", kind="pause", target="train_0")["id"]
    address = weaver.address

    weaver.end(signal.SIGKILL)
    weaver.start()
    gateway = weaver.gateway()
    replica = gateway.ask("replica", id="train_0")
    history = gateway.ask("history", replica="train_0", metric="loss")
    again = RawThreadlet(weaver.address, instance=threadlet.instance, config={"learning_rate": 0.5}, step=199)
    welcome = again.welcome()

    assert weaver.address == address
    assert history == [[began + step, step, float(step)] for step in range(1, 200)]
    assert (replica["config"], replica["step"], replica["seq"]) == ({"learning_rate": 0.5}, 199, last)
    assert replica["devices"] == ["GPU-0"]
    assert welcome["seq"] == last
    assert gateway.ask("policies") == {"train": "pause"}
    assert again.command()[:2] == [waiting, "pause"]
    again.ack(waiting)
    assert gateway.ask("command_state", id=waiting, timeout=BOUND)["outcomes"]["train_0"]["ok"] is True
    assert gateway.ask("command_state", id=applied, timeout=0)["outcomes"]["train_0"]["ok"] is True
    again.send("bye", "done", "finished")
    assert again.receive() == ["goodbye_stored"]  # the command applied before the kill was not sent again
    assert again.receive() == []


def test_reports_that_are_sent_again_are_stored_once(weaver: WeaverProcess, began: float) -> None:
    threadlet = RawThreadlet(weaver.address)
    threadlet.report(1, at=began + 1, loss=1.0)
    threadlet.await_stored(1)
    threadlet.close()

    again = RawThreadlet(weaver.address, instance=threadlet.instance)
    welcome = again.welcome()
    again.report(1, at=began + 1, loss=1.0)
    again.report(2, at=began + 2, loss=0.5)
    again.await_stored(2)

    assert welcome["seq"] == 1
    history = weaver.gateway().ask("history", replica="train_0", metric="loss")
    assert history == [[began + 1, 1, 1.0], [began + 2, 2, 0.5]]


def test_nothing_acknowledged_is_lost_wherever_the_weaver_is_killed(weaver: WeaverProcess, began: float) -> None:
    threadlet = RawThreadlet(weaver.address)
    threadlet.welcome()
    acknowledged = 0
    for round in range(3):
        for _ in range(400):
            threadlet.report(threadlet.seq + 1, at=began + threadlet.seq, loss=float(threadlet.seq))
        acknowledged = threadlet.until(lambda frame: frame[0] == "stored")[1]

        weaver.end(signal.SIGKILL)
        weaver.start()
        history = weaver.gateway().ask("history", replica="train_0", metric="loss", points=10_000)
        again = RawThreadlet(weaver.address, instance=threadlet.instance)
        stored = again.welcome()["seq"]

        assert stored >= acknowledged, f"round {round}"
        assert [step for _, step, _ in history] == list(range(1, stored + 1))
        again.seq = stored
        threadlet = again


def test_a_process_that_is_killed_while_the_weaver_is_away_has_crashed(weaver: WeaverProcess) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    threadlet = RawThreadlet(weaver.address, pid=child.pid)
    threadlet.welcome()
    threadlet.report(1)
    threadlet.await_stored(1)

    weaver.end(signal.SIGKILL)
    child.kill()
    child.communicate()
    weaver.start()

    gateway = weaver.gateway()
    await_true(lambda: gateway.ask("replica", id="train_0")["state"] == "failed")
    replica = gateway.ask("replica", id="train_0")
    assert (replica["ending"], replica["end_reason"]) == ("crashed", f"its process {child.pid} is gone")


def test_a_weaver_outlives_a_full_disk_and_promises_nothing_meanwhile(weaver: WeaverProcess) -> None:
    threadlet = RawThreadlet(weaver.address)
    threadlet.welcome()
    gateway = weaver.gateway()
    assert weaver.process is not None

    resource.prlimit(weaver.pid, resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))  # as if it were full
    while (status := gateway.ask("status"))["undurable_since"] is None:
        threadlet.report(threadlet.seq + 1, **{f"metric_{number}": 0.0 for number in range(100)})
    last = threadlet.report(threadlet.seq + 1, loss=0.5)
    operations: list[tuple[str, dict[str, Any]]] = [
        ("command", {"kind": "pause", "target": "train_0"}),
        ("policy", {"group": "train", "action": "pause"}),
        ("fail_device", {"device": "GPU-0"}),
        ("note", {"kind": "seen", "replica": None, "data": {}}),
    ]
    for operation, arguments in operations:
        with pytest.raises(Refused, match="was not done: the weaver could store nothing"):
            gateway.ask(operation, **arguments)
    assert status["undurable_reason"]
    assert gateway.ask("replicas")[0]["state"] == "running"
    assert weaver.process.poll() is None

    resource.prlimit(weaver.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    threadlet.await_stored(last)
    assert gateway.ask("status")["undurable_since"] is None
    gateway.ask("command", kind="pause", target="train_0")
    assert threadlet.command()[1] == "pause"
    (gap,) = gateway.ask("events", kind="undurable")
    assert gap["since"] == status["undurable_since"]

    weaver.end(signal.SIGKILL)
    weaver.start()
    assert weaver.gateway().ask("replica", id="train_0")["seq"] == last


def test_a_weaver_behind_every_address_is_told_by_the_one_given() -> None:
    with running_weaver("--listen", "0.0.0.0:0", "--advertise", "127.0.0.1") as weaver:
        assert parse_weaver_address(weaver.address).host == "127.0.0.1"
        assert RawThreadlet(weaver.address).welcome()["seq"] == 0


def test_the_weaver_ends_cleanly_and_leaves_no_socket(weaver: WeaverProcess) -> None:
    threadlet = RawThreadlet(weaver.address)
    threadlet.welcome()

    assert weaver.end(signal.SIGTERM) == 0

    assert threadlet.receive() == []
    assert not os.path.exists(weaver.socket)


def test_the_weaver_ends_when_its_parent_does() -> None:
    with running_weaver() as weaver:
        assert weaver.process is not None
        assert weaver.process.stdin is not None

        weaver.process.stdin.close()

        assert weaver.process.wait(BOUND) == 0


def test_a_weaver_ends_with_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "weaver"
    process = start("-m", "loom.weaver", "--state", str(folder), stderr=subprocess.PIPE)
    with process:
        read_json(process)
        shutil.rmtree(folder)
        _, said = process.communicate(timeout=BOUND)

    assert process.returncode == 0
    assert f"the folder {folder} is gone, and the weaver ends with it" in said


def test_a_weaver_of_its_own_takes_requests_over_tcp_and_says_no_key(tmp_path: Path) -> None:
    folder, secret = tmp_path / "weaver", tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 2)
    secret.chmod(0o600)
    options = ["--state", str(folder), "--secret-file", str(secret), "--alert-network", "10.0.0.0/8"]
    with start("-m", "loom.weaver", *options) as process:
        host, _, port = read_json(process)["address"].removeprefix("tcp://").partition(":")
        line = Line(socket.create_connection((host, int(port)), BOUND))
        line.send("hello", Keys(secret.read_bytes()).gateway())
        line.send("ask", 1, ADMIN, "policies", {})
        assert line.receive() == ["answer", 1, {}]

        process.terminate()

        assert process.wait(BOUND) == 0
    names = {path.name for path in folder.iterdir()}
    assert {"holder.json", "link.json", "weaver.sqlite"} <= names
    assert names.isdisjoint({"secret", "weaver.sock"})
    assert json.loads((folder / "alerts.json").read_text())["networks"] == ["10.0.0.0/8"]


def test_a_weaver_that_nobody_needs_any_more_ends() -> None:
    with running_weaver("--linger", "3") as weaver:
        gateway = weaver.gateway()
        assert gateway.ask("status")["replicas"] == {}
        assert weaver.process is not None
        assert weaver.process.poll() is None

        gateway.close()

        assert weaver.process.wait(BOUND) == 0


def test_what_the_weaver_keeps_is_for_its_user_only(weaver: WeaverProcess) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [weaver.folder, *weaver.folder.iterdir()]}

    assert modes[weaver.folder.name] == 0o700
    assert modes["link.json"] == modes["weaver.sock"] == modes["lock"] == 0o600


def test_two_weavers_do_not_share_a_folder(weaver: WeaverProcess) -> None:
    finished = run_weaver("--state", str(weaver.folder))

    assert finished.returncode == 1
    pid = weaver.process.pid
    text = f"error: another weaver (pid {pid}) uses the state folder {weaver.folder}: end it, or choose another\n"
    assert finished.stderr == text


@pytest.mark.guarantees(
    "weaver",
    "A weaver whose state another one has taken acknowledges nothing more and ends, also without file locks",
)
def test_a_weaver_whose_folder_another_one_takes_ends_and_loses_nothing(weaver: WeaverProcess) -> None:
    threadlet, gateway = RawThreadlet(weaver.address), weaver.gateway()
    threadlet.welcome()
    first = weaver.process
    assert first is not None
    (weaver.folder / "lock").unlink()  # a stand-in for a volume that keeps no locks between machines
    with ThreadPoolExecutor(1) as starting:
        second = starting.submit(weaver.start)  # beside the first, whose port it cannot have
        given, stored = [], 0
        try:
            while True:
                threadlet.report(threadlet.seq + 1, loss=float(threadlet.seq))
                given.append(
                    gateway.ask("command", kind="update_config", params={"learning_rate": 0.5}, target="*")["id"]
                )
                stored = threadlet.until(lambda frame: frame[0] == "stored")[1]
        except (AssertionError, OSError):  # it has closed the connection
            second.result()
    with first:
        code = first.wait(BOUND)
    again = RawThreadlet(weaver.address, instance=threadlet.instance)

    assert code == 1
    assert f"error: another weaver has taken the state folder {weaver.folder}" in weaver.output()
    assert f'"pid": {weaver.pid}' in weaver.output()
    assert len(given) >= stored > 0
    assert again.welcome()["seq"] >= stored
    for id in given:
        assert weaver.gateway().ask("command_state", id=id, timeout=0)["id"] == id


def test_a_folder_that_others_can_open_is_refused(weaver: WeaverProcess) -> None:
    weaver.end()
    weaver.folder.chmod(0o755)

    finished = run_weaver("--state", str(weaver.folder))

    assert finished.returncode == 1
    assert "chmod 700" in finished.stderr


def test_a_store_that_is_no_store_is_named(weaver: WeaverProcess) -> None:
    weaver.end()
    (weaver.folder / "weaver.sqlite-wal").unlink()
    (weaver.folder / "weaver.sqlite").write_bytes(b"something else" * 1000)

    finished = run_weaver("--state", str(weaver.folder))

    assert finished.returncode == 1
    assert "cannot keep the weaver's state" in finished.stderr


def test_a_port_that_was_taken_meanwhile_is_not_waited_for(weaver: WeaverProcess) -> None:
    before = parse_weaver_address(weaver.address)
    weaver.end()
    with socket.create_server((before.host, before.port)):
        weaver.start()

    after = parse_weaver_address(weaver.address)
    assert after.key == before.key
    assert after.port != before.port
    assert "will not find this one" in weaver.output()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--listen", "nowhere"), 2),
        (("--listen", "192.0.2.1:0"), 2),
        (("--beat", "0"), 2),
        (("--secret-file", "/nowhere"), 2),
    ],
)
def test_wrong_options_are_refused(weaver: WeaverProcess, options: tuple[str, ...], code: int) -> None:
    weaver.end()

    finished = run_weaver("--state", str(weaver.folder), *options)

    assert finished.returncode == code
    assert finished.stderr.startswith("error: ")


def run_weaver(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loom.weaver", *options],
        capture_output=True,
        text=True,
        timeout=BOUND,
        stdin=subprocess.DEVNULL,
    )


def test_the_line_that_says_ready_has_the_address_and_the_pid(weaver: WeaverProcess) -> None:
    remembered = json.loads((weaver.folder / "link.json").read_text())
    address = parse_weaver_address(weaver.address)

    assert weaver.process is not None
    assert weaver.pid == weaver.process.pid
    assert (remembered["port"], remembered["key"]) == (address.port, None)
