"""``loom run --on``: a command on the hosts of a cluster, with its folder and its packages, and its end here."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import psutil
import pytest

import loom
from loom import Actor, endpoint
from loom.rest_client import Gateway
from loom_proxy.contexts import ContextFile, GatewayContext
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import BOUND, TOKEN, attach, await_true, gateway_of
from tests.support.package_index import NAME, package_index

pytestmark = pytest.mark.slow

LOOM = str(Path(sys.executable).with_name("loom"))

DISTRIBUTED = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("sum", total.item(), flush=True)
dist.destroy_process_group()
"""

LOOP = """
import sys, time
import torch

optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
print("begins", flush=True)
for n in range(int(sys.argv[1])):
    optimizer.step()
    time.sleep(0.01)
print("trained", flush=True)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def hosts(cache: Path) -> Iterator[LocalCluster]:
    """Two hosts with a cache of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOM_CACHE", str(cache))
        with LocalCluster(hosts=2) as running:
            yield running


@pytest.fixture
def weaver(hosts: LocalCluster) -> WeaverProxy:
    return WeaverProxy(hosts.url, hosts.token)


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(hosts: LocalCluster, tmp_path: Path) -> Iterator[Start]:
    """Starts ``loom run --on`` in the project's folder, and kills it after the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, on: str = hosts.url, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        kept = {name: one for name, one in os.environ.items() if name not in ("LOOM_RUN_ID", "LOOM_URL")}
        process = subprocess.Popen(
            [LOOM, "run", "--on", on, *arguments],
            env={**kept, **({"LOOM_TOKEN": hosts.token} if env is None else env)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    out, err = process.communicate(timeout=BOUND * 2)
    return process.returncode, sorted(out.splitlines()), err


def run_id(err: str) -> str:
    return err.partition("loom run: run ")[2].split()[0]


def children_that_run(script: Path) -> list[psutil.Process]:
    def runs(process: psutil.Process) -> bool:
        return any(argument.endswith(script.name) for argument in process.info["cmdline"] or ())

    return [one for one in psutil.process_iter(["cmdline"]) if runs(one) and "run" not in one.info["cmdline"]]


def test_a_training_is_a_run_that_is_watched_stopped_and_described(
    start: Start, tmp_path: Path, weaver: WeaverProxy
) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    process = start("--hosts", "2", "--name", "far", "loop.py", "100000", "--api-key", "hidden")
    await_true(lambda: {one.id for one in weaver.replicas().values() if (one.step or 0) > 2} >= {"far_0", "far_1"})
    second = finish(start("--name", "far", "loop.py", "1"))
    assert (second[0], second[1]) == (1, [])
    assert "a training named 'far' lives ('far_" in second[2]

    weaver.command("stop", None, "far").get(BOUND)
    status, out, err = finish(process)
    assert (status, out) == (0, ["[0] begins", "[1] begins"])
    run = weaver.run(run_id(err))
    assert (run.name, run.state, run.ranks, run.clean) == ("far", "stopped", 2, True)
    assert list(run.command) == ["loop.py", "100000", "--api-key", "***"]
    assert run.commit
    assert run.details().start["tree"]


@pytest.mark.parametrize(
    "command", [["--per-host", "gpus=2", "ddp.py"], ["--", "torchrun", "--nproc-per-node", "2", "ddp.py"]]
)
def test_ranks_of_several_hosts_find_one_another(start: Start, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "ddp.py").write_text(DISTRIBUTED)
    status, out, err = finish(start("--hosts", "2", *command))
    assert (status, [line.split("] ")[1] for line in out]) == (0, ["sum 10.0"] * 4), err


def test_a_host_that_dies_ends_the_ranks_of_the_others(
    own_cluster: LocalCluster, start: Start, tmp_path: Path
) -> None:
    script = tmp_path / "on_a_dead_host.py"
    script.write_text(LOOP)
    process = start(
        "--hosts", "2", script.name, "100000", on=own_cluster.url, env={"LOOM_TOKEN": own_cluster.token}
    )
    assert process.stdout
    assert {process.stdout.readline() for _ in range(2)} == {"[0] begins\n", "[1] begins\n"}
    os.kill(own_cluster.pids[2], signal.SIGKILL)
    status, _, err = finish(process)
    assert status == 1
    assert "Traceback" not in err
    assert "error: " in err
    await_true(lambda: not children_that_run(script))


def test_it_is_followed_through_the_death_of_the_gateway(hosts: LocalCluster, start: Start, tmp_path: Path) -> None:
    wait = "while not pathlib.Path(sys.argv[1]).exists():\n    time.sleep(0.05)\n"
    program = f"import pathlib, sys, time\nprint('begins')\n{wait}print('ends')\nraise SystemExit(3)\n"
    (tmp_path / "waits.py").write_text(program)
    with gateway_of(hosts) as gateway:
        process = start("waits.py", str(tmp_path / "go_on"), on=gateway.url, env={"LOOM_TOKEN": TOKEN})
        assert process.stdout
        assert process.stdout.readline() == "begins\n"
        gateway.end()
        gateway.start()
        (tmp_path / "go_on").touch()
        status, out, err = finish(process)
    assert (status, out) == (3, ["ends"]), err


def test_ctrl_c_leaves_it_running_and_says_how_to_come_back(
    start: Start, tmp_path: Path, weaver: WeaverProxy, hosts: LocalCluster
) -> None:
    script = tmp_path / "left_running.py"
    script.write_text(LOOP)
    process = start("--name", "left", script.name, "100000")
    assert process.stdout
    assert process.stdout.readline() == "begins\n"
    for _ in range(3):
        os.killpg(process.pid, signal.SIGINT)
    status, _, err = finish(process)
    id = run_id(err)
    assert status == 130
    assert f"left running.\n  loom runs show {id}\n  loom logs --session session-" in err
    assert "Traceback" not in err

    await_true(lambda: weaver.run(id).state == "running")
    before = weaver.replica("left_0").step or 0
    await_true(lambda: (weaver.replica("left_0").step or 0) > before)
    session = weaver.run(id).session
    asked = {**os.environ, "LOOM_URL": hosts.url, "LOOM_TOKEN": hosts.token}
    command = [LOOM, "logs", "--session", str(session), "--mesh", "left"]
    shown = subprocess.run(command, env=asked, capture_output=True, text=True, check=True)
    assert "begins" in shown.stdout
    assert children_that_run(script)
    subprocess.run([LOOM, "sessions", "end", str(session)], env=asked, check=True, capture_output=True)
    await_true(lambda: not children_that_run(script))


def test_an_interrupt_before_it_begins_starts_nothing(start: Start, tmp_path: Path, hosts: LocalCluster) -> None:
    script = tmp_path / "never_begun.py"
    script.write_text(LOOP)
    gateway = Gateway(hosts.url, hosts.token)
    before = {str(one["name"]) for one in gateway.sessions()}
    process = start("--name", "never", script.name, "100000")
    assert process.stderr
    assert process.stderr.readline().startswith("loom run: synced ")
    for _ in range(3):
        os.killpg(process.pid, signal.SIGINT)
    status, _, err = finish(process)
    assert (status, "Traceback" in err) == (130, False)
    if "left running" in err:
        pytest.skip("it had begun already")
    assert "interrupted before it began: the command does not run" in err
    await_true(lambda: {str(one["name"]) for one in gateway.sessions()} <= before)
    assert not children_that_run(script)


def test_pip_makes_the_environment_where_uv_is_missing(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from loom.launch.environment import environment_on_this_host
from loom.launch.project import find_packages
made = environment_on_this_host(find_packages(Path(sys.argv[1])), Path(sys.argv[2]))
print(made.tool, made.python)
"""
    base = sys._base_executable  # type: ignore[attr-defined] # beside which there is no uv
    folders = os.pathsep.join({str(Path(one.__file__).parents[1]) for one in (loom, msgpack)})
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": folders, "HOME": str(tmp_path)}
    if shutil.which("uv", path=f"{Path(base).parent}:/usr/bin:/bin"):
        pytest.skip("uv is beside the Python below this environment")
    (tmp_path / "project").mkdir()
    with package_index(tmp_path, "1.0") as index:
        (tmp_path / "project" / "requirements.txt").write_text(f"--index-url {index}\n{NAME}\n")
        command = [base, "-c", program, str(tmp_path / "project"), str(tmp_path / "made")]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    tool, python = done.stdout.split()
    assert tool == "pip", done.stderr
    imported = [python, "-c", f"import {NAME}; print({NAME}.version)"]
    assert subprocess.run(imported, capture_output=True, text=True, check=True).stdout == "1.0\n"


def test_detached_by_a_context_it_goes_on_to_its_end(
    start: Start, tmp_path: Path, weaver: WeaverProxy, hosts: LocalCluster, config: Path
) -> None:
    ContextFile(config / "contexts.json").add(GatewayContext("far", hosts.url), hosts.token)
    (tmp_path / "loop.py").write_text(LOOP)
    status, out, err = finish(start("--name", "detached", "-d", "loop.py", "30", on="far", env={}))
    assert (status, out) == (0, [])
    await_true(lambda: any(one.state != "running" for one in weaver.runs("detached")))
    assert weaver.run(run_id(err)).state == "completed"
    session = re.search(r"in session (\S+):", err)
    assert session is not None
    with attach(hosts, session[1]) as job:
        assert [one.id for one in job.runs()["detached"].trains] == [run_id(err)]

    status, _, err = finish(start("loop.py", "30", on="missing", env={}))
    assert status != 0
    assert "no context named 'missing'; there are: far" in err


def test_its_packages_are_installed_on_the_host_before_it_starts(start: Start, tmp_path: Path, cache: Path) -> None:
    # Loom, which reports, is the host's: the environment has none.
    (tmp_path / "uses.py").write_text(
        f"import sys, {NAME}, loom\nprint({NAME}.version, sys.prefix, loom.Threadlet)\n"
    )
    with package_index(tmp_path / ".git", "1.0", "2.0") as index:
        (tmp_path / "requirements.txt").write_text(f"--index-url {index}\n{NAME}==1.0\n")
        status, out, err = finish(start("--hosts", "2", "uses.py"))
        assert (status, "environment made by" in err) == (0, True), err
        version, prefix, *threadlet = out[0].split()[1:]
        assert (version, Path(prefix).parent, len(out)) == ("1.0", cache / "environments", 2)
        assert "loom.threadlet" in threadlet[-1]

        status, again, err = finish(start("uses.py"))
        assert (status, again[0].split()[1], "environment was there" in err) == (0, prefix, True)
        (tmp_path / "requirements.txt").write_text(f"--index-url {index}\n{NAME}==3.0\n")
        status, out, err = finish(start("uses.py"))
    assert (status, out) == (1, [])
    assert "cannot make the environment" in err
    assert "3.0" in err
    assert "Traceback" not in err


def test_a_lock_brings_its_packages_by_uv(start: Start, tmp_path: Path) -> None:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        pytest.skip("needs uv")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "own.py").write_text("name = 'own'\n")
    (tmp_path / "uses.py").write_text(f"import {NAME}, own\nprint({NAME}.version, own.name)\n")
    project = f'[project]\nname = "own"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = ["{NAME}<2"]\n'
    with package_index(tmp_path / ".git", "1.0", "2.0") as index:
        (tmp_path / "pyproject.toml").write_text(f'{project}[[tool.uv.index]]\nurl = "{index}"\ndefault = true\n')
        status, _, err = finish(start("--env", "none", "uses.py"))
        assert (status, f"No module named '{NAME}'" in err) == (1, True)
        subprocess.run([uv, "lock", "-q"], cwd=tmp_path, check=True)
        status, out, err = finish(start("uses.py"))
        assert (status, out) == (0, ["1.0 own"]), err


class Uses(Actor):
    @endpoint
    def version(self) -> str:
        return str(importlib.import_module(NAME).version)


def version_here() -> str:
    return str(importlib.import_module(NAME).version)


def test_a_session_s_processes_and_functions_have_the_environment_from_then_on(
    hosts: LocalCluster, tmp_path: Path
) -> None:
    with (
        package_index(tmp_path / "index", "1.0", "2.0") as index,
        loom.connect(hosts.url, hosts.token) as job,
    ):
        before = job.hosts.spawn_procs(name="before").spawn("before", Uses)
        requirements = tmp_path / "requirements.txt"
        for version in ("1.0", "2.0"):
            requirements.write_text(f"--index-url {index}\n{NAME}=={version}\n")
            made = job.env(tmp_path if version == "1.0" else requirements)
            assert [one.python.endswith("/bin/python") for one in made.hosts] == [True, True]
            uses = job.hosts.spawn_procs(name=f"uses-{version}").spawn("uses", Uses)
            assert set(uses.version.call().get().values()) == {version}
        assert job.run(version_here) == "2.0"
        with pytest.raises(loom.LoomError, match=f"No module named '{NAME}'"):
            before.version.call().get()
        requirements.write_text(f"--index-url {index}\n{NAME}==3.0\n")
        with pytest.raises(loom.EnvironmentFailed, match="cannot make the environment"):
            job.env(tmp_path)
        with pytest.raises(loom.WrongArguments, match=r"has neither a uv\.lock nor a requirements\.txt"):
            job.env(tmp_path / "index")
