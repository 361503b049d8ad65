"""Every command that asks a gateway, in a cluster of plain manifests, unmodified, with the real kubectl."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.cluster import OneMachineCluster, missing
from tests.support.cluster.laptop import real_kubectl
from tests.support.gateway_commands import UNTIL_CTRL_C, commands_that_ask
from tests.support.needs import skipped_if
from tests.support.paths import ROOT
from tests.support.processes import still_there, tree
from tests.system.cluster.test_pages import IMAGES, deploy, ran, token

pytestmark = [
    skipped_if(missing()),
    pytest.mark.skipif(real_kubectl() is None, reason="needs kubectl 1.31 or newer"),
    pytest.mark.timeout(300),
    pytest.mark.slow,
]

URL = "kube://training/loom-gateway"

LOOM = [sys.executable, "-c", "from loom.cli import main; main()"]

EACH = """
import contextlib, io, json, pathlib, sys
import loom, psutil
from tests.support.cli_page import commands
from tests.support.gateway_commands import arguments

ended = {}
with loom.connect() as job:
    before = set(psutil.Process().children(recursive=True))
    for command in sys.argv[1:]:
        said, shown = "", io.StringIO()
        try:
            with contextlib.redirect_stdout(shown):
                words = arguments(command, pathlib.Path.cwd(), job.session)
                commands()[f"loom {command}"].main(words, standalone_mode=False)
        except loom.LoomError as error:
            said = f"{type(error).__name__}: {error}"
        # A job closes its port on a thread, when its connection is over.
        left = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, 30)[1]
        ended[command] = said, shown.getvalue(), len(left)
print(json.dumps([job.url, ended]))
"""
"""Opens a session by the current context and runs commands next to it; their errors, and what they left running."""

NOT_ASKED = (
    "GatewayUnreachable",
    "NotAGateway",
    "AuthenticationError",
    "InvalidAddress",
    "WrongArguments",
    "Unavailable",
)
"""Errors of a command that has not reached the gateway."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[OneMachineCluster]:
    with OneMachineCluster(images=IMAGES, kubectl=real_kubectl()) as cluster:
        shutil.copytree(ROOT / "images" / "kubernetes", cluster.laptop.home / "images" / "kubernetes")
        ran(cluster, deploy())
        yield cluster


@pytest.fixture(scope="module", autouse=True)
def context(cluster: OneMachineCluster) -> None:
    """The context prod, which is the current one, as its user adds it."""
    adding = cluster.laptop.run(
        [*LOOM, "context", "add", "prod", URL, "--token-stdin"], input=token(cluster) + "\n"
    )
    assert adding.returncode == 0, adding.stderr
    assert "the current one" in adding.stdout


def test_the_context_s_file_is_the_user_s_own(cluster: OneMachineCluster) -> None:
    file = cluster.laptop.home / ".config" / "loom" / "contexts.json"

    assert file.stat().st_mode & 0o777 == 0o600
    listed = cluster.laptop.run([*LOOM, "context", "list"]).stdout
    assert URL in listed
    assert token(cluster) not in listed


def test_a_token_in_the_keyring_opens_the_gateway(cluster: OneMachineCluster) -> None:
    home = cluster.laptop.home
    keyring = {
        "PYTHON_KEYRING_BACKEND": "tests.support.keyrings.OpenKeyring",
        "TEST_KEYRING": str(home / "keyring"),
        "PYTHONPATH": str(ROOT),
        "XDG_CONFIG_HOME": str(home / "another"),
    }
    secret = token(cluster)
    added = cluster.laptop.run([*LOOM, "context", "add", "prod", URL, "--token-stdin"], keyring, input=secret)
    status = cluster.laptop.run([*LOOM, "status"], keyring)

    assert "its token in the keyring" in added.stdout, added.stderr
    assert secret not in (home / "another" / "loom" / "contexts.json").read_text()
    assert "from the context prod" in status.stdout, status.stderr


def test_each_command_reaches_the_gateway_and_leaves_no_kubectl(cluster: OneMachineCluster) -> None:
    wanted = [command for command in commands_that_ask() if command not in UNTIL_CTRL_C]
    done = cluster.laptop.run([sys.executable, "-c", EACH, *wanted], env={"PYTHONPATH": str(ROOT)}, timeout=250.0)
    assert done.returncode == 0, done.stderr

    url, ended = json.loads(done.stdout)

    assert url == URL
    assert list(ended) == wanted
    assert {command: one[0] for command, one in ended.items() if one[0].startswith(NOT_ASKED)} == {}
    assert {command: one[2] for command, one in ended.items() if one[2]} == {}
    assert f"at {URL} (from the context prod), 1 session" in ended["status"][1]
    assert ended["bridge"][0].startswith("NatsUnreachable: ")


@pytest.mark.parametrize("words", [["watch", "--json"], ["dashboard", "--no-browser"]], ids=UNTIL_CTRL_C[::-1])
def test_a_command_that_goes_on_ends_with_ctrl_c_and_so_does_kubectl(
    cluster: OneMachineCluster, words: list[str]
) -> None:
    command = cluster.laptop.popen([*LOOM, *words], stdout=subprocess.PIPE)
    try:
        assert command.stdout
        assert command.stdout.readline()
        processes = tree(command.pid)
        assert any("port-forward" in one.cmdline() for one in processes)
        command.send_signal(signal.SIGINT)
        assert command.wait(30) == 0
    finally:
        command.kill()
        command.wait()
    assert not still_there(processes)


def test_an_argument_and_a_variable_come_before_the_context(cluster: OneMachineCluster) -> None:
    nowhere = "kube://training/nothing"
    named = cluster.laptop.run([*LOOM, "status", "--url", nowhere])
    variable = cluster.laptop.run([*LOOM, "status"], env={"LOOM_URL": nowhere})

    assert '"nothing" not found' in named.stderr
    assert '"nothing" not found' in variable.stderr
    assert "(from LOOM_URL)" in variable.stderr
