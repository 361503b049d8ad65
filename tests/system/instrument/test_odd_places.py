"""``loom run`` in a container that lets a program do little, and beside a name server that never answers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import await_true
from tests.support.needs import skip_because
from tests.support.weavers import await_weaver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = """
import torch

torch.set_num_threads(1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n in range(50):
    model(torch.ones(2)).sum().backward()
    optimizer.step()
print("made", n + 1, "steps")
"""

CONTAINER = """
set -e
mount --make-rprivate /
awk '{print $2}' /proc/mounts | grep -vE '^/(proc|sys|dev)' | while read -r place; do
    mount -o bind,remount,ro "$place" 2>/dev/null || true
done
mount -t tmpfs -o size=64k,mode=1777 tmpfs /tmp
! touch "$PLACE/x" 2>/dev/null
cd "$PLACE"
exec setpriv --reuid 54321 --regid 54321 --clear-groups --inh-caps=-all,+dac_read_search \\
    --ambient-caps=-all,+dac_read_search env -u HOME "$@"
"""
"""A read-only root, 64 KiB for temporary files, and a user without a name and a home, who may read all files."""

SILENT_SERVER = """
set -e
mount --make-rprivate /
mount -o bind "$PLACE/resolv.conf" /etc/resolv.conf
cd "$PLACE"
exec "$@"
"""

NAME_SERVER = "127.66.0.1"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder outside of /tmp with the script."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        skip_because("mount namespaces need root")
    if shutil.which("setpriv") is None:
        skip_because("the program setpriv is not installed")
    folder = Path(f"/var/tmp/loom-test-{os.getpid()}")
    folder.mkdir()
    (folder / "odd.py").write_text(SCRIPT)
    yield folder
    shutil.rmtree(folder)


def run_in(setting: str, place: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    left_out = ("LOOM_WEAVER", "LOOM_URL", "LOOM_TOKEN", "LOOM_RUN", "LOOM_AUTO", "RANK", "XDG_CONFIG_HOME")
    own = {name: value for name, value in os.environ.items() if name not in left_out}
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", setting, "sh", *command],
        env={**own, "PLACE": str(place), **variables},
        capture_output=True,
        text=True,
        timeout=150,
    )


LOOM_RUN = [str(Path(sys.executable).with_name("loom")), "run", "--"]

STARTS = {"loom run": LOOM_RUN, "LOOM_AUTO": []}


@pytest.mark.parametrize("start", STARTS)
def test_a_training_in_a_read_only_container_is_watched(start: str, place: Path, cluster: LocalCluster) -> None:
    weaver = WeaverProxy(cluster.url, cluster.token)
    await_weaver(weaver)
    name = start.replace(" ", "_")
    variables = {"LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token, "LOOM_RUN": name}
    options = ["--name", name, "--"] if STARTS[start] else []

    done = run_in(
        CONTAINER,
        place,
        *(*LOOM_RUN[:-1], *options) if options else (),
        *(sys.executable, "odd.py"),
        **variables,
        LOOM_AUTO="" if options else "1",
    )

    assert (done.stdout, done.stderr, done.returncode) == ("made 50 steps\n", "", 0)
    await_true(lambda: getattr(weaver.replicas().get(f"{name}_0"), "step", None) == 50)


@pytest.mark.parametrize("start", STARTS)
def test_a_name_server_that_never_answers_holds_up_no_step(start: str, place: Path) -> None:
    (place / "resolv.conf").write_text(f"nameserver {NAME_SERVER}\noptions timeout:30 attempts:5\n")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind((NAME_SERVER, 53))
        silent.settimeout(1.0)

        done = run_in(
            SILENT_SERVER,
            place,
            *(*STARTS[start], sys.executable, "odd.py"),
            LOOM_URL="wss://gateway.example:8470",
            LOOM_AUTO="" if STARTS[start] else "1",
        )

        assert (done.stdout, done.returncode) == ("made 50 steps\n", 0)
        assert b"gateway" in silent.recv(512)  # it was asked
