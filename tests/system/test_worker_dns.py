"""Workers behind a headless service's name, as a real DNS server (dnsmasq) gives it in a network of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.needs import skipped_if
from tests.support.network.namespaces import missing

BOUND = 30.0

SCRIPT = """
import json, signal, subprocess, sys, time
from pathlib import Path
from loom.errors import WorkerUnreachable
from loom_gateway.workers.sources import WorkerHosts, parse_source

folder = Path(sys.argv[1])
steps = json.loads(sys.argv[2])
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
(folder / "resolv.conf").write_text("nameserver 127.0.0.1\\noptions timeout:1 attempts:1\\n")
subprocess.run(["mount", "--bind", folder / "resolv.conf", "/etc/resolv.conf"], check=True)
(folder / "hosts").write_text("")
server = subprocess.Popen(
    ["dnsmasq", "--keep-in-foreground", "--no-resolv", "--no-hosts", "--listen-address=127.0.0.1",
     "--bind-interfaces", "--user=root", "--pid-file=", f"--addn-hosts={folder}/hosts", "--log-facility=-"],
    stderr=subprocess.PIPE, text=True,
)
hosts = WorkerHosts([parse_source("dns://loom-workers.ns.svc.cluster.local?count=3")])
try:
    next(line for line in server.stderr if f"{folder}/hosts" in line)  # it has read them once, as it starts
    for step in steps:
        (folder / "hosts").write_text("".join(f"{line}\\n" for line in step))
        server.send_signal(signal.SIGHUP)
        next(line for line in server.stderr if f"{folder}/hosts" in line)  # it has read them
        try:
            hosts.look()
            hosts.check_complete()
            print(json.dumps(hosts.addresses))
        except WorkerUnreachable as error:
            print(json.dumps(str(error)))
finally:
    server.kill()
    server.wait()
"""
"""Gives the service's name one set of addresses after the other, and tells what is found each time."""

SERVICE = "loom-workers.ns.svc.cluster.local"

pytestmark = skipped_if(missing() or ("" if shutil.which("dnsmasq") else "dnsmasq is not installed"))


def found(folder: Path, *steps: list[str]) -> list[Any]:
    """What a gateway finds after each step, where a step is the lines of the server's file of hosts."""
    script = ["unshare", "--net", "--mount", sys.executable, "-c", SCRIPT, str(folder), json.dumps(steps)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=BOUND)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def pod(address: str, ordinal: int) -> str:
    """A pod of a StatefulSet: its address leads to its own name, and the service's name to its address."""
    return f"{address} loom-worker-{ordinal}.{SERVICE} {SERVICE}"


def test_pods_have_the_numbers_in_their_names_also_when_they_are_replaced(tmp_path: Path) -> None:
    before, replaced = found(
        tmp_path,
        [pod("10.0.0.9", 0), pod("10.0.0.5", 2), pod("10.0.0.20", 1)],
        [pod("10.0.0.9", 0), pod("10.0.0.5", 2), pod("10.0.0.3", 1)],
    )

    assert before == ["tcp://10.0.0.9:26600", "tcp://10.0.0.20:26600", "tcp://10.0.0.5:26600"]
    assert replaced == ["tcp://10.0.0.9:26600", "tcp://10.0.0.3:26600", "tcp://10.0.0.5:26600"]


def test_pods_without_names_are_in_the_order_of_their_addresses_and_stay(tmp_path: Path) -> None:
    before, replaced = found(
        tmp_path,
        [f"{address} {SERVICE}" for address in ("10.0.0.20", "10.0.0.9", "10.0.0.100")],
        [f"{address} {SERVICE}" for address in ("10.0.0.1", "10.0.0.9", "10.0.0.100")],
    )

    assert before == ["tcp://10.0.0.9:26600", "tcp://10.0.0.20:26600", "tcp://10.0.0.100:26600"]
    assert replaced == ["tcp://10.0.0.9:26600", "tcp://10.0.0.1:26600", "tcp://10.0.0.100:26600"]


def test_too_few_pods_are_told_by_number_and_come_later(tmp_path: Path) -> None:
    nobody, two, three = found(
        tmp_path,
        [],
        [pod("10.0.0.9", 0), pod("10.0.0.5", 2)],
        [pod("10.0.0.9", 0), pod("10.0.0.5", 2), pod("10.0.0.7", 1)],
    )

    assert f"{SERVICE}, the headless service of 3 workers, cannot be resolved" in nobody
    assert f"2 of 3 workers of workers have been found at {SERVICE}" in two
    assert "missing: number 1" in two
    assert three == ["tcp://10.0.0.9:26600", "tcp://10.0.0.7:26600", "tcp://10.0.0.5:26600"]
