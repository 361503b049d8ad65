"""What processes print, on the laptop and with ``loom logs``."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable
from typing import Any

import psutil
import pytest

import loom
from loom import Actor, current_rank, endpoint
from loom.wire.bodies import LogLines
from loom_gateway.driver.output.lines import LONGEST_LINE, Aggregator, LineSplitter
from loom_gateway.driver.output.spool import LogSpool
from loom_gateway.sessions.log_feed import LogQuery
from loom_gateway.sessions.log_reader import KEEP_ENDED, SessionLogs
from loom_proxy.local import LocalCluster
from loom_proxy.logs import LogLine, LogReceiver
from tests.integration.calls.test_failures import BOUND, driver_pid, rest

COMMAND = "from loom.cli import main; main()"


class Talker(Actor):
    """Prints what it is told to."""

    @endpoint
    def say(self, text: str, stream: str = "stdout") -> None:
        print(text, file=getattr(sys, stream))

    @endpoint
    def say_bytes(self, data: bytes) -> None:
        os.write(1, data)

    @endpoint
    def say_rank(self) -> None:
        print("my rank is", current_rank().rank)

    @endpoint
    def log(self, level: int, text: str) -> None:
        logging.basicConfig()
        logging.getLogger("training").log(level, text)

    @endpoint
    def level(self) -> int:
        return logging.getLogger().level

    @endpoint
    def fork(self, text: str) -> None:
        subprocess.run(["echo", text], check=True)

    @endpoint
    def flood(self, megabytes: int) -> None:
        line = "x" * 99
        for _ in range(megabytes * 10_000):
            print(line)
        print("the flood is over")

    @endpoint
    def die(self, last_words: str) -> None:
        print(last_words)
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def kill_agent(self) -> int:
        """The process id of the process's agent, which is killed."""
        # Not by `children`, which leaves out what seems older than its parent, as after a change of the clock.
        (agent,) = [
            process.pid
            for process in psutil.process_iter(["ppid", "cmdline"])
            if process.info["ppid"] == os.getpid()
            and any("lifeline.agent" in part for part in process.info["cmdline"] or ())
        ]
        os.kill(agent, signal.SIGKILL)
        for _ in range(5000):
            print("nobody hears this", flush=True)  # and it raises nothing
        return agent


class Lines:
    """Collects the lines of a job, and waits for one."""

    def __init__(self, job: loom.Job) -> None:
        self._lines: list[LogLine] = []
        self._changed = threading.Condition()
        job.on_log(self._add)

    def _add(self, line: LogLine) -> None:
        with self._changed:
            self._lines.append(line)
            self._changed.notify_all()

    def wait_for(self, found: Callable[[LogLine], Any]) -> LogLine:
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(found, self._lines)), BOUND), self._lines
            return next(line for line in self._lines if found(line))

    def texts(self, stream: str = "stdout") -> list[str]:
        with self._changed:
            return [line.text for line in self._lines if line.stream == stream]

    def all(self) -> list[LogLine]:
        with self._changed:
            return list(self._lines)


@pytest.fixture
def lines(job: loom.Job) -> Lines:
    return Lines(job)


def attach(cluster: LocalCluster, session: str) -> loom.Job:
    """Connect to a session as soon as the gateway has noticed that its last client is gone."""
    until = time.monotonic() + BOUND
    while True:
        try:
            return loom.connect(cluster.url, cluster.token, session=session)
        except loom.SessionInUse:
            assert time.monotonic() < until


def talkers(job: loom.Job, name: str = "trainers", gpus: int = 2) -> tuple[Any, Any]:
    procs = job.hosts.spawn_procs(per_host={"gpus": gpus}, name=name)
    return procs, procs.spawn(f"{name} talkers", Talker)


# -- lines reach the laptop ---------------------------------------------------------------------------------


def test_both_streams_are_printed_with_mesh_and_place(job: loom.Job, capsys: pytest.CaptureFixture[str]) -> None:
    _, talker = talkers(job)
    one = talker.slice(hosts=1, gpus=0)
    one.say.call_one("to the output").get()
    one.say.call_one("to the errors", "stderr").get()
    job.flush_logs(BOUND)
    printed = capsys.readouterr()
    assert "[trainers/hosts=1,gpus=0] to the output\n" in printed.out
    assert "[trainers/hosts=1,gpus=0] to the errors\n" in printed.err
    assert "to the errors" not in printed.out


def test_nothing_is_printed_where_print_logs_is_off(
    job: loom.Job, lines: Lines, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job.print_logs
    job.print_logs = False
    _, talker = talkers(job)
    talker.say.call("not on the screen").get()
    job.flush_logs(BOUND)
    assert set(lines.texts()) == {"not on the screen"}
    assert "not on the screen" not in capsys.readouterr().out


def test_identical_lines_of_several_ranks_are_one(job: loom.Job, lines: Lines) -> None:
    procs, talker = talkers(job)
    procs.logging_option(stream_to_client=True, aggregate_window_sec=60).get()
    before = time.time()
    talker.say.call("the same").get()
    talker.say_rank.call().get()
    job.flush_logs(BOUND)
    same = lines.wait_for(lambda line: line.text == "the same")
    assert same.count == 4
    assert sorted(same.ranks) == [0, 1, 2, 3]
    assert before - 60 < same.time < time.time() + 60
    assert str(same).startswith("[4 similar log lines] [trainers/hosts=")
    own = {line.text: (line.ranks, line.place) for line in lines.all() if line.text.startswith("my rank")}
    assert own == {f"my rank is {rank}": ((rank,), f"hosts={rank // 2},gpus={rank % 2}") for rank in range(4)}


def test_without_a_window_each_line_comes_by_itself(job: loom.Job, lines: Lines) -> None:
    procs, talker = talkers(job)
    procs.logging_option(stream_to_client=True).get()
    talker.say.call("the same").get()
    job.flush_logs(BOUND)
    assert sorted((line.ranks, line.count) for line in lines.all()) == [((rank,), 1) for rank in range(4)]


def test_lines_come_without_being_asked_for(job: loom.Job, lines: Lines) -> None:
    _, talker = talkers(job, gpus=1)
    talker.say.call("on its own").get()
    lines.wait_for(lambda line: line.text == "on its own")
    talker.say_bytes.call(b"a line that does not end").get()
    lines.wait_for(lambda line: line.text == "a line that does not end")


def test_streaming_is_off_and_on_for_one_mesh(job: loom.Job, lines: Lines) -> None:
    quiet_procs, quiet = talkers(job, "quiet", 1)
    _, loud = talkers(job, "loud", 1)
    quiet_procs.logging_option(stream_to_client=False).get()
    quiet.say.call("hidden").get()
    loud.say.call("seen").get()
    job.flush_logs(BOUND)
    assert set(lines.texts()) == {"seen"}
    quiet_procs.logging_option(stream_to_client=True).get()
    quiet.say.call("seen again").get()
    job.flush_logs(BOUND)
    assert set(lines.texts()) == {"seen", "seen again"}


async def test_logging_option_can_be_awaited_as_monarchs(job: loom.Job, lines: Lines) -> None:
    procs, talker = talkers(job, gpus=1)
    assert await procs.logging_option(stream_to_client=True, aggregate_window_sec=3, level=logging.INFO) is None
    await talker.say.call("awaited")
    job.flush_logs(BOUND)
    assert lines.texts() == ["awaited"]


def test_logging_is_streamed_from_the_level_that_was_set(job: loom.Job, lines: Lines) -> None:
    procs, talker = talkers(job, gpus=1)
    assert set(talker.level.call().get().values()) == {logging.INFO}
    talker.log.call(logging.WARNING, "a warning").get()
    procs.logging_option(stream_to_client=True, level=logging.ERROR).get()
    until = time.monotonic() + BOUND
    while set(talker.level.call().get().values()) != {logging.ERROR}:  # Monarch does not say when it has set it
        assert time.monotonic() < until
    talker.log.call(logging.WARNING, "no warning").get()
    talker.log.call(logging.ERROR, "an error").get()
    job.flush_logs(BOUND)
    texts = " ".join(lines.texts("stderr"))
    assert "a warning" in texts
    assert "an error" in texts
    assert "no warning" not in texts


def test_what_a_process_starts_is_captured_too(job: loom.Job, lines: Lines) -> None:
    _, talker = talkers(job, gpus=1)
    talker.slice(hosts=0).fork.call_one("printed by a child").get()
    job.flush_logs(BOUND)
    assert lines.texts() == ["printed by a child"]


def test_bytes_that_are_not_text_and_very_long_lines_come_through(job: loom.Job, lines: Lines) -> None:
    _, talker = talkers(job, gpus=1)
    one = talker.slice(hosts=0)
    one.say_bytes.call_one(b"\xff\xfe bytes\n").get()
    one.say_bytes.call_one("ä".encode()[:1]).get()
    one.say_bytes.call_one("ä".encode()[1:] + b"\n").get()
    one.say_bytes.call_one(b"y" * LONGEST_LINE + b"z" * LONGEST_LINE + b"zzzzz\n").get()
    job.flush_logs(BOUND)
    texts = lines.texts()
    assert texts[:2] == ["\ufffd\ufffd bytes", "ä"]
    assert [len(text) for text in texts[2:]] == [LONGEST_LINE, LONGEST_LINE, 5]


def test_the_last_words_of_a_killed_process_come(job: loom.Job, lines: Lines) -> None:
    _, talker = talkers(job)
    victim = talker.slice(hosts=0, gpus=1)
    with pytest.raises(loom.SupervisionError):
        victim.die.call_one("these are my last words").get(BOUND)
    line = lines.wait_for(lambda line: line.text == "these are my last words")
    assert (line.mesh, line.ranks, line.place) == ("trainers", (1,), "hosts=0,gpus=1")


def test_closing_a_job_prints_what_its_processes_printed_last(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with loom.connect(cluster.url, cluster.token) as job:
        procs, talker = talkers(job)
        procs.logging_option(stream_to_client=True, aggregate_window_sec=60).get()
        talker.say.call("just before the end").get()
    assert "[4 similar log lines] [trainers/hosts=" in capsys.readouterr().out


@pytest.mark.slow
def test_a_flood_is_cut_and_does_not_starve_calls(job: loom.Job, lines: Lines) -> None:
    job.print_logs = False
    _, flooder = talkers(job, "flooder", 1)
    _, other = talkers(job, "other", 1)
    other.say_rank.call().get()
    flooding = flooder.slice(hosts=0).flood.call_one(30)
    answered = 0
    while not flooding.done():
        other.level.call().get(BOUND)
        answered += 1
    flooding.get(BOUND)
    job.flush_logs(BOUND)
    flooded = [line for line in lines.all() if line.mesh == "flooder"]
    assert answered > 5
    assert flooded[-1].text == "the flood is over"
    assert any("were left out" in line.text for line in flooded)
    assert sum(line.count for line in flooded) < 300_000


def test_a_process_goes_on_when_its_agent_is_killed(job: loom.Job, lines: Lines) -> None:
    _, talker = talkers(job, gpus=1)
    one = talker.slice(hosts=0)
    agent = one.kill_agent.call_one().get(BOUND)
    until = time.monotonic() + BOUND
    while "heard again" not in lines.texts():
        assert time.monotonic() < until
        one.say.call_one("heard again").get(BOUND)  # or not, as long as the process has no other agent
        job.flush_logs(BOUND)
    assert not psutil.pid_exists(agent)
    assert "process_lost" not in [event.name for event in job.events(timeout=0)]


def test_a_process_leaves_no_zombie_of_its_agent(cluster: LocalCluster, job: loom.Job) -> None:
    workers = [psutil.Process(pid) for pid in cluster.pids[1:]]
    procs, talker = talkers(job, gpus=1)
    talker.level.call().get(BOUND)
    agents = [
        child
        for worker in workers
        for child in worker.children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "-I" in child.cmdline()
    ]
    assert len(agents) >= 2
    procs.stop().get(BOUND)
    assert psutil.wait_procs(agents, timeout=BOUND)[1] == []


def test_an_earlier_callback_that_raises_keeps_no_line_from_the_next(
    job: loom.Job, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(line: LogLine) -> None:
        raise ValueError("no use")

    remove = job.on_log(fail)
    lines = Lines(job)
    _, talker = talkers(job, gpus=1)
    talker.say.call("first").get()
    job.flush_logs(BOUND)
    assert "a callback for log lines raised" in caplog.text
    caplog.clear()
    remove()
    talker.say.call("second").get()
    job.flush_logs(BOUND)
    assert lines.texts() == ["first", "second"]
    assert not caplog.text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"level": 300}, "Invalid logging level: 300"),
        ({"level": "INFO"}, "Invalid logging level"),
        ({"aggregate_window_sec": 3}, "without streaming"),
        ({"stream_to_client": True, "aggregate_window_sec": -1}, "aggregate_window_sec=-1"),
        ({"stream_to_client": True, "aggregate_window_sec": "3"}, "aggregate_window_sec='3'"),
    ],
)
def test_a_wrong_logging_option_is_refused_before_it_is_sent(
    job: loom.Job, options: dict[str, Any], text: str
) -> None:
    procs = job.hosts.spawn_procs()
    with pytest.raises(loom.InvalidLogOption, match=text) as caught:
        procs.logging_option(**options)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(loom.InvalidLogOption, match="part of a mesh"):
        procs.slice(hosts=0).logging_option(stream_to_client=True)


# -- loom logs and REST -------------------------------------------------------------------------------------


@pytest.fixture
def environment(cluster: LocalCluster) -> dict[str, str]:
    return {**os.environ, "LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token}


def loom_logs(environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "logs", *options],
        env=environment, capture_output=True, text=True, timeout=BOUND, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture
def talked(job: loom.Job) -> loom.Job:
    """A session in which each of two ranks of two meshes printed two lines."""
    job.print_logs = False
    for name in ("trainers", "readers"):
        _, talker = talkers(job, name, 1)
        talker.say.call(f"hello from {name}").get()
        talker.say.call(f"trouble in {name}", "stderr").get()
    job.flush_logs(BOUND)
    return job


def test_loom_logs_shows_all_and_filters(talked: loom.Job, environment: dict[str, str]) -> None:
    every = loom_logs(environment, "--session", talked.session)
    assert every.returncode == 0, every.stderr
    assert sorted(every.stdout.splitlines()) == sorted(
        f"[{name}/hosts={rank},gpus=0] {text} {name}"
        for name in ("trainers", "readers")
        for rank in range(2)
        for text in ("hello from", "trouble in")
    )
    of_rank = loom_logs(environment, "--session", talked.session, "--mesh", "readers", "--rank", "1")
    assert sorted(of_rank.stdout.splitlines()) == [
        "[readers/hosts=1,gpus=0] hello from readers",
        "[readers/hosts=1,gpus=0] trouble in readers",
    ]
    out = loom_logs(environment, "--session", talked.session, "--stream", "stderr", "--tail", "1", "--json")
    (line,) = map(json.loads, out.stdout.splitlines())
    assert (line["mesh"], line["stream"], line["text"]) == ("readers", "stderr", "trouble in readers")
    assert line["rank"] in (0, 1)
    assert line["place"] == f"hosts={line['rank']},gpus=0"


@pytest.mark.slow
def test_loom_logs_follows_until_the_session_ends(cluster: LocalCluster, environment: dict[str, str]) -> None:
    with loom.connect(cluster.url, cluster.token) as job:
        job.print_logs = False
        procs, talker = talkers(job, gpus=1)
        procs.logging_option(stream_to_client=False).get()
        talker.say.call("before").get()
        following = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "logs", "--session", job.session, "--follow"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        try:
            assert following.stdout
            assert sorted(following.stdout.readline() for _ in range(2)) == [
                f"[trainers/hosts={rank},gpus=0] before\n" for rank in range(2)
            ]
            talker.slice(hosts=1).say.call_one("while it is followed").get()
            assert following.stdout.readline() == "[trainers/hosts=1,gpus=0] while it is followed\n"
            job.close()
            rest_of_it, errors = following.communicate(timeout=BOUND)
        finally:
            following.kill()
            following.wait()
    assert (rest_of_it, errors, following.returncode) == ("", "", 0)


def test_loom_logs_ends_quietly_at_ctrl_c(job: loom.Job, environment: dict[str, str]) -> None:
    _, talker = talkers(job, gpus=1)
    talker.slice(hosts=0).say.call_one("going on").get()
    following = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "logs", "--session", job.session, "--follow"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert following.stdout
    assert "going on" in following.stdout.readline()
    following.send_signal(signal.SIGINT)
    assert following.communicate(timeout=BOUND) == ("", "")
    assert following.returncode == 0


def test_a_session_without_a_client_is_logged_and_found_when_it_has_ended(
    cluster: LocalCluster, environment: dict[str, str]
) -> None:
    job = loom.connect(cluster.url, cluster.token)
    _, talker = talkers(job, gpus=1)
    talker.flood.broadcast(1)
    talker.say.broadcast("nobody looks")
    job.detach()
    again = attach(cluster, job.session)
    again.print_logs = False
    again.meshes["trainers talkers"].say_rank.call().get(BOUND)
    again.flush_logs(BOUND)
    again.detach()
    of_rank = ("--mesh", "trainers", "--rank", "0", "--tail", "2")
    tail = loom_logs(environment, "--session", job.session, *of_rank).stdout
    assert tail.splitlines() == ["[trainers/hosts=0,gpus=0] nobody looks", "[trainers/hosts=0,gpus=0] my rank is 0"]
    pid = driver_pid(cluster, job)
    rest(cluster, f"/api/v1/sessions/{job.session}", "DELETE")
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=BOUND)
    ended = loom_logs(environment, "--session", job.session)
    assert "[trainers/hosts=1,gpus=0] nobody looks" in ended.stdout


def test_what_a_run_prints_is_in_the_log_too(job: loom.Job, environment: dict[str, str]) -> None:
    nothing = loom_logs(environment, "--session", job.session, "--mesh", "driver")
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, "", "")
    job.run(lambda: print("printed beside the meshes"))
    shown = loom_logs(environment, "--session", job.session, "--mesh", "driver")
    assert shown.stdout == "[driver] printed beside the meshes\n"


def test_bad_questions_are_answered_with_what_there_is(talked: loom.Job, environment: dict[str, str]) -> None:
    unknown = loom_logs(environment, "--session", "nobody")
    assert unknown.returncode == 8
    assert "no log of a session named 'nobody'" in unknown.stderr
    here = ("--session", talked.session)
    mesh = loom_logs(environment, *here, "--mesh", "writers", "--follow")
    assert mesh.returncode == 1
    assert "no proc mesh named 'writers'; it has: 'trainers', 'readers'" in mesh.stderr
    rank = loom_logs(environment, *here, "--mesh", "readers", "--rank", "2")
    assert rank.returncode == 1
    assert "no rank 2 in 'readers': it has 2 processes, 0 to 1" in rank.stderr
    assert "--mesh" in loom_logs(environment, *here, "--rank", "1").stderr
    for options in (("--rank", "1"), ("--tail", "-1"), ("--stream", "both")):
        assert loom_logs(environment, *here, *options).returncode == 2
    assert loom_logs({**environment, "LOOM_TOKEN": "wrong"}, *here).returncode == 6


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("stream=both", 422, "wrong_arguments"),
        ("tail=-1", 422, "wrong_arguments"),
        ("rank=1", 422, "wrong_arguments"),
        ("mesh=writers", 404, "no_such_mesh"),
        ("mesh=writers&follow=1", 404, "no_such_mesh"),
    ],
)
def test_rest_refuses_with_a_code(cluster: LocalCluster, job: loom.Job, query: str, status: int, code: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        rest(cluster, f"/api/v1/sessions/{job.session}/logs?{query}")
    assert caught.value.code == status
    assert json.load(caught.value)["error"]["code"] == code


def test_rest_needs_a_token_for_logs(cluster: LocalCluster, job: loom.Job) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        rest(cluster, f"/api/v1/sessions/{job.session}/logs", token="wrong")
    assert caught.value.code == 401


# -- the parts ----------------------------------------------------------------------------------------------


def test_a_progress_bar_is_one_line() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"\r10 %\r20 %\r") == []
    assert splitter.feed(b"30 %\r99 %\r100 %\ndone\r\n") == ["100 %", "done"]
    assert not splitter.has_rest
    splitter.feed(b"half a l")
    assert splitter.flush() == ["half a l"]
    assert splitter.flush() == []


def test_an_endless_line_is_cut() -> None:
    splitter = LineSplitter()
    pieces = [piece for _ in range(10) for piece in splitter.feed(b"z" * LONGEST_LINE)]
    assert [len(piece) for piece in pieces] == [LONGEST_LINE] * 9
    assert splitter.flush() == ["z" * LONGEST_LINE]


def test_aggregation_keeps_the_order_of_each_rank() -> None:
    aggregator = Aggregator()
    for rank in range(2):
        for text in ("Traceback", "  in f", "  ^^^", "  in g", "  ^^^", "Error"):
            aggregator.add(0.0, rank, "stderr", text)
    lines = aggregator.take()
    assert [(line.text, line.count) for line in lines] == [
        ("Traceback", 2), ("  in f", 2), ("  ^^^", 2), ("  in g", 2), ("  ^^^", 2), ("Error", 2)
    ]  # fmt: skip
    for _ in range(1000):
        aggregator.add(0.0, 0, "stdout", "again")
    aggregator.add(0.0, 0, "stderr", "again")
    assert [(line.stream, line.count, line.ranks) for line in aggregator.take()] == [
        ("stdout", 1000, [0]),
        ("stderr", 1, [0]),
    ]
    assert len(aggregator) == 0


def entry(text: str, rank: int = 0) -> dict[str, Any]:
    return {"time": 0.0, "mesh": "trainers", "rank": rank, "place": "", "stream": "stdout", "text": text}


def texts(lines: list[bytes]) -> list[str]:
    return [json.loads(line)["text"] for line in lines]


def test_the_spool_is_bounded_and_knows_its_meshes_after_a_turn(tmp_path: Any) -> None:
    path = str(tmp_path / "s.log")
    spool = LogSpool(path, limit=4096)
    spool.add_processes("trainers", 2)
    for number in range(200):
        spool.append([entry(f"line {number}")])
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2 * 4096
    logs = SessionLogs()
    logs.add("s", path)
    kept = texts(logs.read("s", LogQuery(mesh="trainers", rank=0)))
    assert kept == [f"line {number}" for number in range(200 - len(kept), 200)]
    assert len(kept) > 30
    assert texts(logs.read("s", LogQuery(tail=2))) == ["line 198", "line 199"]
    assert logs.read("s", LogQuery(tail=0)) == []
    with pytest.raises(loom.NoSuchRank):
        logs.read("s", LogQuery(mesh="trainers", rank=2))


async def test_following_misses_nothing_when_the_file_turns(tmp_path: Any) -> None:
    path = str(tmp_path / "s.log")
    spool = LogSpool(path, limit=2000)
    logs = SessionLogs()
    logs.add("s", path)
    following = await logs.follow("s", LogQuery())
    seen: list[str] = []
    for number in range(0, 60, 10):  # each ten are less than a file
        spool.append(entry(f"line {n}") for n in range(number, number + 10))
        seen += texts((await anext(following)).splitlines())
    logs.ended("s", path)
    async for piece in following:
        seen += texts(piece.splitlines())
    assert seen == [f"line {n}" for n in range(60)]


def test_a_disk_that_takes_nothing_costs_the_history_only(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    spool = LogSpool(str(tmp_path / "nowhere" / "s.log"))
    for _ in range(3):
        spool.append([entry("lost")])
    assert len(caplog.records) == 1


def test_logs_of_ended_sessions_are_kept_for_a_while(tmp_path: Any) -> None:
    logs = SessionLogs()
    for number in range(KEEP_ENDED + 1):
        path = tmp_path / f"{number}.log"
        LogSpool(str(path)).append([entry("kept")])
        logs.add(str(number), str(path))
        logs.ended(str(number), str(path))
    assert not (tmp_path / "0.log").exists()
    with pytest.raises(loom.UnknownSession, match="no log of a session named '0' is kept any more"):
        logs.read("0", LogQuery())
    assert texts(logs.read("1", LogQuery())) == ["kept"]


def test_a_user_who_ends_many_sessions_pushes_out_no_other_users_logs(tmp_path: Any) -> None:
    logs = SessionLogs()
    for number in range(KEEP_ENDED + 2):
        path = tmp_path / f"{number}.log"
        LogSpool(str(path)).append([entry("kept")])
        logs.ended(str(number), str(path), "ann" if number == 0 else "bob")
    assert texts(logs.read("0", LogQuery())) == ["kept"]
    assert not (tmp_path / "1.log").exists()


def test_lines_for_a_terminal_that_is_gone_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    import msgpack

    receiver, seen = LogReceiver(), threading.Event()
    receiver.add_callback(lambda line: seen.set())
    monkeypatch.setattr(sys, "stdout", None)
    lines = msgpack.packb([(0.0, "trainers", "", [0], "stdout", "text", 1)])
    receiver.take(LogLines().message(parts=[lines]))
    assert seen.wait(BOUND)
    assert receiver.drain(BOUND)
