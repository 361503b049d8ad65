"""Commands run in the processes of ranks, and none of them outlives its rank, its program or its session."""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import loom
from loom.cli.app import app
from loom_proxy.local import LocalCluster
from loom_proxy.mesh.procs import ProcMeshProxy
from loom_proxy.remote_exec.execution import Execution
from loom_proxy.remote_exec.rank import RankProcess, rank_process
from tests.integration.remote_exec.remains import await_gone
from tests.support.gateways import BOUND, await_true
from tests.support.network.gate import Gate
from tests.support.processes import LOOM, start


def first_number(execution: Execution) -> int:
    """Return the number that a command prints first, such as its process id."""
    printed = b""
    for output in execution.output(BOUND):
        printed += output.data
        if b"\n" in printed:
            break
    return int(printed)


def test_a_command_runs_in_the_environment_of_its_rank(trainers: ProcMeshProxy) -> None:
    command = 'echo "$RANK $EXTRA"; pwd; echo wrong >&2; exit 3'

    (found,) = trainers.exec(command, 1, env={"EXTRA": "more"}).results(BOUND)

    folder = trainers.exec(["readlink", "/proc/self/cwd"], 1).results(BOUND)[0].stdout
    assert found.stdout == b"1 more\n" + folder
    assert (found.rank, found.status, found.stderr) == (1, 3, b"wrong\n")


def test_a_command_is_answered_within_half_a_second(trainers: ProcMeshProxy) -> None:
    trainers.exec(["true"]).results(BOUND)
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        trainers.exec(["true"], 0).results(BOUND)
        taken.append(time.perf_counter() - began)

    assert min(taken) < 0.5


def test_a_command_runs_on_every_rank_and_the_highest_status_counts(trainers: ProcMeshProxy) -> None:
    execution = trainers.exec("echo $RANK; exit $RANK")

    assert [(one.rank, one.stdout) for one in execution.results(BOUND)] == [(0, b"0\n"), (1, b"1\n")]
    assert execution.status == 1
    (part,) = trainers.slice(hosts=1).exec("echo $RANK", 0).results(BOUND)
    assert (part.rank, part.stdout) == (0, b"1\n")


def test_input_reaches_a_command_and_its_end_too(trainers: ProcMeshProxy) -> None:
    data = bytes(range(256)) * 8192

    with trainers.exec(["wc", "-c"]) as execution:
        execution.write(data)
        execution.close_input()

        assert [int(one.stdout) for one in execution.results(BOUND)] == [len(data)] * 2


def test_a_signal_reaches_a_command_with_all_that_it_has_started(trainers: ProcMeshProxy) -> None:
    execution = trainers.exec("sleep 1000 & echo $!; wait", 0)
    started = first_number(execution)

    execution.signal(signal.SIGTERM)

    assert execution.results(BOUND)[0].status == 128 + signal.SIGTERM
    await_gone(started)


def test_what_a_command_leaves_running_ends_with_it(trainers: ProcMeshProxy) -> None:
    (found,) = trainers.exec("sleep 1000 & echo $!", 0).results(BOUND)

    await_gone(int(found.stdout))


def test_output_is_whole_though_the_line_is_cut(gate: Gate, trainers: ProcMeshProxy) -> None:
    total = 0
    for output in trainers.exec("head -c 6000000 /dev/zero", 0).output(BOUND):
        if total < 1 << 20 <= total + len(output.data):
            gate.cut()
        total += len(output.data)

    assert total == 6_000_000


def test_a_command_ends_when_its_program_is_silent_for_too_long(trainers: ProcMeshProxy, tmp_path: Path) -> None:
    there = tmp_path / "pid"
    execution = trainers.exec(f"echo $$ > {there}.new; mv {there}.new {there}; sleep 1000", 0, away=0.2)

    await_true(there.exists)
    await_gone(int(there.read_text()))

    with pytest.raises(loom.NotFound, match="silent for too long"):
        execution.results(BOUND)


def test_a_command_ends_when_its_rank_is_killed(far: loom.Job) -> None:
    procs = far.hosts.slice(hosts=0).spawn_procs(name="killed")
    execution = procs.exec("echo $PPID; echo $$; sleep 1000", 0)
    printed = b""
    for output in execution.output(BOUND):
        printed += output.data
        if printed.count(b"\n") == 2:
            break
    rank, command = map(int, printed.split())

    procs.exec(["kill", "-KILL", str(rank)], 0)

    await_gone(command)
    with pytest.raises(loom.SupervisionError, match="gone"):
        execution.results(BOUND)


def test_a_command_ends_with_its_session(cluster: LocalCluster) -> None:
    with loom.connect(cluster.url, cluster.token) as job:
        command = first_number(job.hosts.spawn_procs().exec("echo $$; sleep 1000", 0))

    await_gone(command)


@pytest.mark.parametrize("name", ["train", "train_async"])
def test_a_command_runs_beside_an_actor_that_is_busy(trainers: ProcMeshProxy, tmp_path: Path, name: str) -> None:
    class Busy(loom.Actor):
        @loom.endpoint
        def train(self, until: str) -> None:
            while not os.path.exists(until):
                time.sleep(0.01)

    class BusyLoop(loom.Actor):
        @loom.endpoint
        async def train_async(self, until: str) -> None:
            while not os.path.exists(until):  # noqa: ASYNC240 - it holds up its loop on purpose
                time.sleep(0.01)  # noqa: ASYNC251

    end = tmp_path / "end"
    busy = trainers.spawn(name, Busy if name == "train" else BusyLoop)
    training = getattr(busy, name).call(str(end))
    try:
        assert len(trainers.exec(["true"]).results(BOUND)) == 2
        assert not training.done()
    finally:
        end.touch()
    training.get(BOUND)


def test_a_driver_that_does_not_know_an_operation_says_so(trainers: ProcMeshProxy) -> None:
    process = rank_process(trainers, 0)
    copy = process.ask("copy_from", "/tmp", 5.0).get(BOUND)

    with pytest.raises(loom.ProtocolMismatch, match="no operation 'fly' on ranks"):
        process.ask("fly").get(BOUND)
    with pytest.raises(loom.ProtocolMismatch, match="no operation 'close' on files"):
        process.ask("file", copy, "close").get(BOUND)
    with pytest.raises(loom.NotFound, match="not forwarded any more"):
        process.ask("connect", "an invented handle", 5.0).get(BOUND)
    process.ask("end", copy).get(BOUND)


def test_a_driver_refuses_ranks_that_are_not_there(trainers: ProcMeshProxy) -> None:
    calls = trainers._whole.caller

    with pytest.raises(loom.NoSuchRank, match="'trainers' has no rank 9"):
        RankProcess(calls, trainers._ident, "trainers", 9, 9).ask("exec", ["true"], {}, 5.0).get(BOUND)
    with pytest.raises(loom.WrongArguments, match="'hosts' is no mesh of processes or actors"):
        RankProcess(calls, 0, "hosts", 0, 0).ask("exec", ["true"], {}, 5.0).get(BOUND)


def test_a_signal_that_does_not_exist_is_an_error(trainers: ProcMeshProxy) -> None:
    with trainers.exec("read line", 0) as execution, pytest.raises(loom.WrongArguments, match="no signal 999"):
        execution.signal(999)


def test_what_is_not_there_is_an_error_that_names_it(trainers: ProcMeshProxy) -> None:
    (found,) = trainers.exec(["no-such-program"], 0).results(BOUND)

    assert (found.status, b"no-such-program" in found.stderr) == (127, True)
    with pytest.raises(loom.NoSuchRank, match=r"'trainers'.* has no rank 2: its ranks are 0 to 1"):
        trainers.exec(["true"], 2)


def test_an_endpoint_may_have_the_name_of_such_a_method(far: loom.Job, trainers: ProcMeshProxy) -> None:
    class Module(loom.Actor):
        @loom.endpoint
        def forward(self, number: int) -> int:
            return 2 * number

    modules = trainers.spawn("modules", Module)

    assert modules.forward.call(4).get(BOUND).item(hosts=1) == 8
    assert modules.exec("echo $RANK", 1).results(BOUND)[0].stdout == b"1\n"


def test_the_command_line_shows_ranks_and_ends_with_the_status(
    far: loom.Job, trainers: ProcMeshProxy, cluster: LocalCluster, tmp_path: Path
) -> None:
    options = ["--url", cluster.url, "--token", cluster.token, "--session", far.session, "--mesh"]

    done = CliRunner().invoke(app, ["exec", *options, "trainers", "--", "sh", "-c", "printf $RANK; exit $RANK"])
    assert (done.stdout, done.exit_code) == ("[0] 0\n[1] 1\n", 1)
    one = CliRunner().invoke(app, ["exec", *options, "trainers", "--rank", "1", "--", "sh", "-c", "printf $RANK"])
    assert (one.stdout, one.exit_code) == ("1", 0)
    none = CliRunner().invoke(app, ["exec", *options, "nothing", "--", "true"])
    assert isinstance(none.exception, loom.NoSuchMesh)
    assert "there is no mesh 'nothing'" in str(none.exception)
    far.hosts.spawn_procs(name="gone").stop().get(BOUND)
    gone = CliRunner().invoke(app, ["exec", *options, "gone", "--", "true"])
    assert isinstance(gone.exception, loom.NoSuchMesh)
    assert "mesh 'gone' was stopped" in str(gone.exception)


@pytest.fixture
def command_line(
    far: loom.Job, trainers: ProcMeshProxy, cluster: LocalCluster
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``loom exec`` on rank 1."""
    started = []

    def run(*words: str) -> subprocess.Popen[str]:
        options = ["--url", cluster.url, "--token", cluster.token, "--session", far.session, "--rank", "1"]
        started.append(start("-c", LOOM, "exec", *options, "--mesh", "trainers", *words))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_the_command_line_passes_on_input_and_interrupts(
    command_line: Callable[..., subprocess.Popen[str]],
) -> None:
    process = command_line("--stdin", "--", "sh", "-c", "read word; echo got $word; exec sleep 1000")
    assert process.stdin
    assert process.stdout
    process.stdin.write("this\n")
    process.stdin.flush()
    assert process.stdout.readline() == "got this\n"

    process.send_signal(signal.SIGINT)

    assert process.wait(BOUND) == 130


@pytest.mark.slow
def test_the_second_interrupt_kills(command_line: Callable[..., subprocess.Popen[str]]) -> None:
    process = command_line("--", "sh", "-c", "trap 'echo no' INT; echo $$; while :; do sleep 0.1; done")
    assert process.stdout
    pid = int(process.stdout.readline())

    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "no\n"
    process.send_signal(signal.SIGINT)

    assert process.wait(BOUND) == 137
    await_gone(pid)


@pytest.mark.slow
def test_a_command_ends_when_its_command_line_is_killed(
    command_line: Callable[..., subprocess.Popen[str]],
) -> None:
    process = command_line("--away", "1", "--", "sh", "-c", "echo $$; sleep 1000")
    assert process.stdout
    pid = int(process.stdout.readline())

    process.kill()

    await_gone(pid)
