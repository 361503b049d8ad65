"""What user code in a driver or on a worker can find out of the gateway's secrets."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.support.gateways import TOKEN, Gateway, await_true, gateway_of
from tests.support.processes import tree

SECRET = "a secret that only clients know"


@pytest.fixture(scope="module")
def guarded() -> Iterator[LocalCluster]:
    with LocalCluster(1, token=SECRET) as cluster:
        yield cluster


def variables_with_secrets() -> list[str]:
    return [name for name, value in os.environ.items() if SECRET in value]


class Looks(loom.Actor):
    @loom.endpoint
    def variables(self) -> list[str]:
        return variables_with_secrets()


@pytest.mark.guarantees("drivers", "No user code has the gateway's token in its environment")
def test_no_user_code_has_the_gateways_token_in_its_environment(guarded: LocalCluster) -> None:
    with loom.connect(guarded.url, SECRET) as job:
        in_the_driver = job.run(variables_with_secrets)
        on_a_worker = job.hosts.spawn_procs().spawn("looks", Looks).variables.call_one().get()

    assert in_the_driver == []
    assert on_a_worker == []


@pytest.mark.guarantees("drivers", "No process of a gateway shows the token in `/proc/PID/environ`")
def test_no_process_shows_the_token_to_processes_of_its_user_id(guarded: LocalCluster) -> None:
    with loom.connect(guarded.url, SECRET) as job:
        assert job.hosts
        processes = [process for pid in guarded.pids for process in tree(pid)]
        shown = []
        for process in processes:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                if SECRET.encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                    shown.append(process.pid)

    assert shown == []


@pytest.mark.guarantees("drivers", "A token that was given is printed nowhere")
def test_a_token_that_was_given_is_printed_nowhere(cluster: LocalCluster) -> None:
    with gateway_of(cluster) as gateway:
        assert gateway.announced.keys() == {"event", "url", "pid"}
        assert TOKEN not in (gateway.folder / "output").read_text()


@pytest.mark.guarantees(
    "drivers", "If what started a gateway without `--driver-uids` shows the token, the gateway warns"
)
@pytest.mark.parametrize(("options", "warns"), [((), True), (("--exit-with-parent",), False)])
def test_a_token_that_what_starts_the_gateway_shows_is_warned_of(options: Sequence[str], warns: bool) -> None:
    # It has no workers, and ends with that. A shell starts it that stays, as a container's init does.
    command = ["sh", "-c", '"$@"; :', "sh", sys.executable, "-m", "loom_gateway", *options]
    variables = {**os.environ, "LOOM_TOKEN": SECRET}
    said = subprocess.run(command, env=variables, stdin=subprocess.PIPE, capture_output=True, text=True).stderr

    assert "a gateway needs workers" in said
    assert ("user code can read the gateway's token" in said) == warns
    assert SECRET not in said


@pytest.mark.guarantees(
    "drivers", "The gateway's own token is replaced without ending a session, and the old one is refused"
)
def test_the_own_token_is_replaced_and_its_sessions_go_on(cluster: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(SECRET)
    gateway = Gateway(cluster.workers)
    gateway.token_file = path
    try:
        gateway.start()
        job = loom.connect(gateway.url, SECRET)
        pid = job.run(os.getpid)

        fresh = tmp_path / "fresh"
        fresh.touch(0o600)
        fresh.write_text(TOKEN)
        fresh.replace(path)

        with pytest.raises(loom.AuthenticationError):
            loom.connect(gateway.url, SECRET)
        await_true(lambda: job.closed)
        with gateway.connect(job.session) as again:
            assert again.run(os.getpid) == pid
        assert gateway.announced.keys() == {"event", "url", "pid"}
    finally:
        gateway.close()
