"""The current folder has files with the names of modules: Loom's own processes import none of them."""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.chaos.host import agent
from loom.process.child import python
from loom.process.listen import free_ports
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import BOUND
from tests.support.paths import ROOT
from tests.support.processes import LOOM, read_json, start

HIDING = (
    "argparse", "asyncio", "collections", "ctypes", "json", "logging", "loom", "loom_auto", "loom_gateway",
    "loom_proxy", "monarch", "msgpack", "numpy", "random", "socket", "torch", "typing", "uvicorn", "uvloop",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder meanwhile: each of its files raises when it is imported, but for the user's own."""
    folder = tmp_path_factory.mktemp("current")
    for name in HIDING:
        (folder / f"{name}.py").write_text("raise SystemError(f'imported: {__file__}')\n")
    (folder / "neighbour.py").write_text("WORD = 'the user\\'s own'\n")
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def there(folder: Path) -> Iterator[LocalCluster]:
    with LocalCluster(1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def session(there: LocalCluster) -> Iterator[loom.Job]:
    with loom.connect(there.url, there.token) as job:
        yield job


class Importer(loom.Actor):
    @loom.endpoint
    def found(self) -> tuple[str, str, str]:
        return found()


def found() -> tuple[str, str, str]:
    """What a function of the user finds: its folder's own module, and the others' where they belong."""
    import random

    import neighbour  # type: ignore[import-not-found]

    return neighbour.WORD, str(random.__file__), str(loom.__file__)


def in_nested_processes() -> Any:
    from monarch.actor import this_host

    return this_host().spawn_procs(per_host={"gpus": 1}).spawn("nested", Importer).found.call_one().get()


def _by_actor(job: loom.Job, hosts: Any) -> Any:
    return hosts.spawn_procs(per_host={"gpus": 1}).spawn("importer", Importer).found.call_one().get(BOUND)


def _by_command(job: loom.Job) -> Any:
    """What a program of the user, which has its folder first on its path, finds in the process of a rank."""
    program = [sys.executable, "-c", "import neighbour, sys; print(neighbour.WORD, sys.flags.safe_path)"]
    (ended,) = job.hosts.spawn_procs(per_host={"gpus": 1}).exec(program).results(BOUND)
    return ended.stdout


WAYS: dict[str, Callable[[loom.Job], Any]] = {
    "a run in the driver": lambda job: job.run(found),
    "an actor": lambda job: _by_actor(job, job.hosts),
    "an actor of another interpreter": lambda job: _by_actor(job, job.hosts.with_python_executable(sys.executable)),
    "an actor of processes that a run starts": lambda job: job.run(in_nested_processes),
}


def _needs_the_present_line() -> None:
    installed = Path(str(distribution("monarch-loom").locate_file("loom_auto.pth")))
    if installed.read_text() != (ROOT / "loom" / "loom_auto.pth").read_text():
        pytest.skip("the installed loom_auto.pth is that of another version: install Loom again")


@pytest.mark.parametrize("way", WAYS)
def test_users_code_finds_its_neighbour_and_the_right_modules(session: loom.Job, way: str) -> None:
    if way != "a run in the driver":
        _needs_the_present_line()
    import random

    assert WAYS[way](session) == ("the user's own", random.__file__, loom.__file__)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no safe path")
def test_a_users_program_has_its_folder_first(session: loom.Job, folder: Path) -> None:
    _needs_the_present_line()
    assert _by_command(session) == b"the user's own False\n"


def test_the_gateways_second_process_and_a_query_of_the_weaver(there: LocalCluster) -> None:
    http = there.url.replace("ws://", "http://")
    asked = urllib.request.Request(f"{http}/metrics", headers={"Authorization": f"Bearer {there.token}"})
    with urllib.request.urlopen(asked, timeout=BOUND) as answer:
        assert b"loom_sessions" in answer.read()

    assert [list(row) for row in WeaverProxy(there.url, there.token).query("SELECT 1 AS one").rows] == [[1]]


def test_the_agent_of_a_fault(folder: Path) -> None:
    removed = threading.Event()
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        try:
            _, strike = agent.keep("folder", "sigstop", {}, 0.1, sleeper.pid, lambda evidence: removed.set())
            assert strike is not None
            strike()
            assert removed.wait(BOUND)
        finally:
            sleeper.kill()


@pytest.mark.slow
@pytest.mark.parametrize("module", ["loom.exporters", "loom_gateway.pod", "loom.weaver"])
def test_other_processes_start(folder: Path, module: str) -> None:
    done = subprocess.run(python(module, "--help"), capture_output=True, text=True, timeout=BOUND)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_commands_that_serve(folder: Path) -> None:
    """The commands run by a program in another folder, as the script ``loom`` does."""
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    for command in (["worker", "--address", address], ["gateway", "--port", "0", "--worker", address]):
        program = f"import sys; sys.path.remove(''); {LOOM}"
        with start("-c", program, "serve", *command, "--exit-with-parent") as served:
            assert served.stdin
            with served.stdin:
                assert read_json(served)["event"] == "listening"
