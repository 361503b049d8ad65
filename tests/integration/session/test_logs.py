"""What processes print, on the laptop."""

from __future__ import annotations

import logging
import time
from typing import Any

import psutil
import pytest

import loom
from loom_gateway.driver.output.collector import LONGEST_LINE
from loom_proxy.local import LocalCluster
from loom_proxy.logs import LogLine
from tests.integration.calls.test_failures import BOUND
from tests.integration.session.talkers import Lines, talkers


@pytest.fixture
def lines(job: loom.Job) -> Lines:
    return Lines(job)


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def procs(shared: loom.Job) -> loom.ProcMeshProxy:
    return shared.hosts.spawn_procs()


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
    procs: loom.ProcMeshProxy, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(loom.InvalidLogOption, match=text) as caught:
        procs.logging_option(**options)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(loom.InvalidLogOption, match="part of a mesh"):
        procs.slice(hosts=0).logging_option(stream_to_client=True)
