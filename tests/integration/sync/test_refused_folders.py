"""Folders that cannot be synced, hosts that cannot take them, and what the progress bar shows."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import loom
from loom_proxy import progress
from loom_proxy.code_sync import scan as project_folder
from loom_proxy.local import LocalCluster
from loom_proxy.progress import WaitStep
from tests.integration.sync.projects import WAIT, Environment, Machines, Project, values


def test_a_path_that_is_no_folder(shared: loom.Job, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    with pytest.raises(loom.NotAFolder, match="not there"):
        shared.sync(tmp_path / "nothing")
    with pytest.raises(loom.NotAFolder, match="a file"):
        shared.sync(file)


def test_a_folder_that_is_too_large_for_the_laptop(
    job: loom.Job, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("small.py", "")
    project.write("data/large.bin", bytes(5000))
    monkeypatch.setenv("LOOM_SYNC_LIMIT", "4096")

    with pytest.raises(loom.TooLarge, match=r"5000 bytes.*4096.*exclude.*data/large\.bin"):
        job.sync(project.folder)
    assert job.sync(project.folder, exclude=["*.bin"]).files == 1


def test_a_folder_that_is_too_large_for_the_cluster(shared: loom.Job, project: Project) -> None:
    with project.write("sparse.bin", "").open("wb") as sparse:
        sparse.truncate(65 << 20)

    with pytest.raises(loom.TooLarge, match=r"the cluster's limit.*sparse\.bin"):
        shared.sync(project.folder)


def test_nothing_is_applied_when_a_file_changes_while_it_is_read(
    job: loom.Job, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = project.write("restless.py", "VERSION = 1\n")
    job.sync(project.folder)
    place.write_text("VERSION = 2\n")
    read = project_folder.UnchangedFile.read

    def read_and_change(self: Any, count: int) -> bytes:
        data = read(self, count)
        place.write_text("VERSION = 333\n")
        return data

    with monkeypatch.context() as patch:
        patch.setattr(project_folder.UnchangedFile, "read", read_and_change)
        with pytest.raises(loom.FileChanged, match=r"restless\.py was changed"):
            job.sync(project.folder)

    assert values(job.hosts.spawn_procs().spawn("e", Environment).version_of.call("restless")) == [1, 1]


def test_a_file_that_is_not_what_was_announced_is_refused(
    shared: loom.Job, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("announced.py", f"VERSION = {random.random()}\n")
    monkeypatch.setattr(project_folder, "_digest", lambda file, advance: ("0" * 64, file.size))

    with pytest.raises(loom.FileChanged, match="while it was being sent"):
        shared.sync(project.folder)


def test_an_unreadable_file(shared: loom.Job, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = project.write("secret.key", "x")
    open_file = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == str(secret):
            raise PermissionError(13, "Permission denied")
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)  # permissions would not stop root

    with pytest.raises(loom.UnreadableFile, match=r"secret\.key.*Permission denied"):
        shared.sync(project.folder)


def test_links_that_lead_outside_or_in_circles(job: loom.Job, project: Project, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    link = project.folder / "link"

    for target in ("../outside", str(tmp_path / "outside"), "/etc/passwd"):
        link.symlink_to(target)
        with pytest.raises(loom.UnsafeLink, match="outside"):
            job.sync(project.folder)
        link.unlink()
    link.symlink_to("other")
    (project.folder / "other").symlink_to("link")
    with pytest.raises(loom.UnsafeLink, match="circles"):
        job.sync(project.folder)
    assert job.sync(project.folder, exclude=["link", "other"]).skipped == 2


@pytest.mark.parametrize("arguments", [{"exclude": [3]}, {"name": 3}])
def test_arguments_of_another_kind(shared: loom.Job, project: Project, arguments: Any) -> None:
    with pytest.raises(loom.WrongArguments):
        shared.sync(project.folder, **arguments)


def test_an_empty_folder_gives_a_warning(job: loom.Job, project: Project) -> None:
    result = job.sync(project.folder)

    assert result.files == 0
    assert "nothing to ship" in result.warnings[0]


def test_a_closed_job(machines: Machines, project: Project) -> None:
    job = loom.connect(machines.url, machines.token)
    job.close()

    with pytest.raises(loom.SessionClosed):
        job.sync(project.folder)


def test_a_host_that_cannot_make_its_cache(
    job: loom.Job, machines: Machines, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("no_room.py", f"VERSION = {random.random()}\n")
    cache = machines.host_caches[1]
    job.sync(project.folder)
    project.write("no_room.py", "VERSION = 'later'\n")
    shutil.rmtree(cache)
    cache.write_text("a file in its place")
    try:
        with pytest.raises(loom.SyncFailed, match="host 1"):
            job.sync(project.folder)
    finally:
        cache.unlink()

    job.sync(project.folder)
    actors = job.hosts.spawn_procs().spawn("environment", Environment)
    assert values(actors.version_of.call("no_room")) == ["later", "later"]


@pytest.mark.slow
def test_a_lost_host_does_not_stop_the_others(tmp_path: Path, project: Project) -> None:
    project.write("survivor.py", "VERSION = 1\n")
    with (
        LocalCluster(hosts=2, env={"LOOM_CACHE": str(tmp_path / "cache")}) as cluster,
        loom.connect(cluster.url, cluster.token) as job,
    ):
        job.sync(project.folder)
        os.kill(cluster.pids[2], signal.SIGKILL)
        assert next(event for event in job.events(WAIT) if event.name == "host_lost")
        project.write("survivor.py", "VERSION = 22\n")

        result = job.sync(project.folder)

        assert any("host 1 is lost" in warning for warning in result.warnings)
        actors = job.hosts.slice(hosts=0).spawn_procs().spawn("environment", Environment)
        assert actors.version_of.call_one("survivor").get(WAIT) == 22


# -- the progress bar ---------------------------------------------------------------------------------------


class Recorder:
    """Stands in for a terminal."""

    steps: list[WaitStep]
    closed: bool

    def __init__(self) -> None:
        Recorder.steps = []
        Recorder.closed = False

    def show(self, step: WaitStep, seconds: float) -> None:
        Recorder.steps.append(step)

    def close(self) -> None:
        Recorder.closed = True


def test_progress_shows_each_step(job: loom.Job, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.write("big.bin", random.Random(2).randbytes(8 << 20))
    monkeypatch.setattr(progress, "TerminalDisplay", Recorder)

    job.sync(project.folder, name="shown", progress=True)

    texts = [step.text for step in Recorder.steps]
    for step in ("looking through it", "reading", "sending", "giving it to every host"):
        assert any(text.startswith(f"syncing shown: {step}") for text in texts), texts
    assert {step.total for step in Recorder.steps} == {0, 8 << 20}
    assert Recorder.closed


def test_nothing_is_shown_without_a_terminal(
    job: loom.Job, project: Project, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOOM_PROGRESS", raising=False)
    project.write("big.bin", random.Random(3).randbytes(1 << 20))

    job.sync(project.folder)

    assert capfd.readouterr() == ("", "")


def test_a_pattern_longer_than_any_path_is_refused_at_once(shared: loom.Job, tmp_path: Path) -> None:
    with pytest.raises(loom.WrongArguments, match=r"^exclude: a pattern of 2,097,152 characters"):
        shared.sync(tmp_path, exclude=["x" * (2 << 20)])
