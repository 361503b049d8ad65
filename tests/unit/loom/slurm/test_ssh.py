"""What a login node behind ssh answers when it does not let in. ``ssh`` is a stand-in here, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

import loom
from loom.slurm.login import LocalLogin
from loom.slurm.ssh import SshAddress, SshLogin, login_of, parse_ssh_address


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for ssh, which says what the file ``says`` beside it has, and fails as ssh does."""
    script = tmp_path / "ssh"
    script.write_text('#!/bin/sh\necho "this is a stand-in for ssh" >&2\ncat "${0%/*}/says" >&2\nexit 255\n')
    script.chmod(0o755)
    (tmp_path / "says").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "says"


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (
            "ann@hpc: Permission denied (publickey,password).",
            "password or another key: load your key with `ssh-add`",
        ),
        ("Received disconnect: Too many authentication failures", "log in once with `ssh ann@hpc`"),
        ("No ED25519 host key is known.\nHost key verification failed.", "not known here: run `ssh ann@hpc` once"),
        (
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "another than at earlier connections: ask the site",
        ),
    ],
)
def test_a_login_node_that_does_not_let_in_says_what_to_do(ssh: Path, says: str, told: str) -> None:
    ssh.write_text(says)

    with pytest.raises(loom.LoginRefused, match=told) as raised:
        login_of("ssh://ann@hpc").run(["sinfo"])

    assert raised.value.code == "login_refused"
    assert says.splitlines()[-1] in str(raised.value)


def test_a_login_node_that_is_not_reached_is_told_with_what_ssh_said(ssh: Path) -> None:
    ssh.write_text("ssh: Could not resolve hostname hpc: Name or service not known\n")

    with pytest.raises(
        loom.LoginUnreachable, match=r"Could not resolve hostname.*`ssh -p 22022 hpc` works"
    ) as raised:
        login_of("ssh://hpc:22022").run(["sinfo"])

    assert raised.value.code == "login_unreachable"


def test_a_shell_that_runs_nothing_is_told(ssh: Path) -> None:
    ssh.with_name("ssh").write_text("#!/bin/sh\necho 'This account is closed: a stand-in for ssh.'\nexit 1\n")

    with pytest.raises(loom.LoginUnreachable, match=r"does not run commands.*This account is closed"):
        login_of("ssh://hpc").run(["sinfo"])


def test_a_login_node_that_does_not_answer_in_time_is_named(ssh: Path) -> None:
    ssh.with_name("ssh").write_text(
        '#!/bin/sh\ncase "$*" in *" -O "*) exit 255;; esac\nexec sleep 60 # a stand-in\n'
    )

    with pytest.raises(loom.LoginUnreachable, match=r"sinfo on ann@hpc did not end within 0\.01 s"):
        login_of("ssh://ann@hpc").run(["sinfo"], timeout=0.01)


def test_without_ssh_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(loom.MissingDependency, match="ssh://hpc needs ssh, which is not on PATH"):
        SshLogin(SshAddress("hpc"))


@pytest.mark.parametrize(
    ("address", "read"),
    [
        ("ssh://hpc", SshAddress("hpc")),
        ("ssh://ann@login-1.hpc.example:2222/", SshAddress("login-1.hpc.example", "ann", 2222)),
        ("ssh://ann@[fd00::1]:22", SshAddress("fd00::1", "ann", 22)),
    ],
)
def test_an_address_names_a_login_node(address: str, read: SshAddress) -> None:
    assert parse_ssh_address(address) == read
    assert f"ssh://{read}" == address.rstrip("/")


@pytest.mark.parametrize(
    "address", ["ssh://", "ssh://-oProxyCommand=x", "ssh://-x@hpc", "ssh://hpc:0", "ssh://a/b", "http://hpc", "hpc"]
)
def test_an_address_of_another_form_is_refused(address: str) -> None:
    with pytest.raises(loom.InvalidAddress, match="write ssh://USER@HOST"):
        login_of(address)


def test_this_machine_needs_no_address() -> None:
    assert isinstance(login_of(None), LocalLogin)
