"""The log of a session, with ``loom logs`` and over REST."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error

import psutil
import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.integration.calls.test_failures import BOUND, driver_pid, rest
from tests.integration.session.talkers import talkers
from tests.support.gateways import attach

COMMAND = "from loom.cli import main; main()"


@pytest.fixture
def environment(cluster: LocalCluster) -> dict[str, str]:
    return {**os.environ, "LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token}


def loom_logs(environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "logs", *options],
        env=environment, capture_output=True, text=True, timeout=BOUND, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture(scope="module")
def talked(shared: loom.Job) -> loom.Job:
    """A session in which each of two ranks of two meshes printed two lines."""
    shared.print_logs = False
    for name in ("trainers", "readers"):
        _, talker = talkers(shared, name, 1)
        talker.say.call(f"hello from {name}").get()
        talker.say.call(f"trouble in {name}", "stderr").get()
    shared.flush_logs(BOUND)
    return shared


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


@pytest.mark.slow
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
def test_rest_refuses_with_a_code(
    cluster: LocalCluster, talked: loom.Job, query: str, status: int, code: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        rest(cluster, f"/api/v1/sessions/{talked.session}/logs?{query}")
    assert caught.value.code == status
    assert json.load(caught.value)["error"]["code"] == code


def test_rest_needs_a_token_for_logs(cluster: LocalCluster, talked: loom.Job) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        rest(cluster, f"/api/v1/sessions/{talked.session}/logs", token="wrong")
    assert caught.value.code == 401
