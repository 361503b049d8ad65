"""A login node behind a real ssh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import loom
from loom.slurm.ssh import login_of
from tests.support.sshd import LoginNode, login_node

NOISE = """\
ForceCommand echo "Welcome to the login node"; eval "$SSH_ORIGINAL_COMMAND"
"""
"""As of a shell whose profile prints something."""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoginNode]:
    with login_node(tmp_path / "node", monkeypatch, server=NOISE) as node:
        yield node


def test_commands_and_files_go_through_one_connection(node: LoginNode, tmp_path: Path) -> None:
    login = login_of("ssh://login")

    done = login.run(
        ["sh", "-c", 'cat; printf "%s|" "$@"; echo no >&2; exit 3', "sh", "a b", "it's\n$HOME", "žluť"]
    )
    missing = login.run(["loom-has-no-such-command"])
    login.write(str(tmp_path / "token"), b"\xff\x00token")

    assert (done.code, done.stdout, done.stderr) == (3, "a b|it's\n$HOME|žluť|", "no\n")
    assert missing.code == 127
    assert login.run(["cat"], input=b"given").stdout == "given"
    assert login.read(str(tmp_path / "token")) == b"\xff\x00token"
    assert node.logins == 1
    login.close()
    assert not node.clients


def test_the_users_own_open_connection_is_used(node: LoginNode) -> None:
    """As at a site where each connection needs a code."""
    with node.shared_connection():
        login = login_of("ssh://login")
        assert login.run(["echo", "here"]).stdout == "here\n"
        login.close()
        assert login.run(["echo", "here"]).stdout == "here\n"
        assert node.logins == 1


def test_a_login_node_whose_key_is_not_known_is_refused(node: LoginNode) -> None:
    node.forget_key()

    with pytest.raises(loom.LoginRefused, match="host key of login is not known here: run `ssh login` once"):
        login_of("ssh://login").run(["true"])


def test_a_key_that_is_not_accepted_is_told(node: LoginNode) -> None:
    node.configure("PubkeyAuthentication no")

    with pytest.raises(loom.LoginRefused, match="load your key with `ssh-add`"):
        login_of("ssh://login").run(["true"])
