"""What a sync sends: only what is lacking, with links and modes, and again what caches have lost."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import loom
from loom_proxy.code_sync import folders as sync
from tests.integration.sync.projects import WAIT, Environment, Machines, Project, model, values


def test_a_second_sync_sends_only_what_changed(job: loom.Job, project: Project) -> None:
    for number in range(20):
        project.write(f"parts/part{number}.py", f"NUMBER = {number}\n")
    first = job.sync(project.folder)
    second = job.sync(project.folder)
    project.write("parts/part3.py", "NUMBER = 'three'\n")
    third = job.sync(project.folder)

    assert (first.files, first.sent_files) == (20, 20)
    assert first.bytes == first.sent_bytes == sum(len(f"NUMBER = {number}\n") for number in range(20))
    assert (second.files, second.sent_files, second.sent_bytes) == (20, 0, 0)
    assert second.digest == first.digest
    assert (third.files, third.sent_files, third.sent_bytes) == (20, 1, len("NUMBER = 'three'\n"))
    assert third.digest != first.digest


def test_another_session_sends_nothing_either(machines: Machines, project: Project) -> None:
    project.write("shared.py", "SHARED = 'between sessions'\n")
    with loom.connect(machines.url, machines.token) as job:
        assert job.sync(project.folder).sent_files == 1
    with loom.connect(machines.url, machines.token) as job:
        assert job.sync(project.folder).sent_files == 0


def test_equal_files_are_sent_once(job: loom.Job, project: Project) -> None:
    for name in "abc":
        project.write(f"equal_{name}.py", "EQUAL = 'three times'\n")

    result = job.sync(project.folder)

    assert (result.files, result.sent_files, result.sent_bytes) == (3, 1, 22)


def test_a_large_file_and_an_empty_one_arrive(job: loom.Job, project: Project) -> None:
    data = random.Random(1).randbytes(20 << 20)
    project.write("data/weights.bin", data)
    project.write("data/zeros.bin", bytes(5 << 20))
    project.write("data/__init__.py", "")
    project.write("large_data.py", LARGE)
    large_data = project.load("large_data")

    result = job.sync(project.folder)
    actors = job.hosts.spawn_procs().spawn("large", large_data.Large)

    assert result.sent_bytes == (25 << 20) + len(LARGE)
    expected = [(20 << 20, hashlib.sha256(data).hexdigest())] * 2
    assert values(actors.look.call("weights.bin")) == expected
    assert [size for size, _ in values(actors.look.call("zeros.bin"))] == [5 << 20] * 2


LARGE = """
import hashlib, pathlib
from loom import Actor, endpoint

class Large(Actor):
    @endpoint
    def look(self, name):
        data = (pathlib.Path(__file__).parent / "data" / name).read_bytes()
        return len(data), hashlib.sha256(data).hexdigest()
"""


def test_a_sync_that_was_interrupted_leaves_nothing_behind(
    job: loom.Job, machines: Machines, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("interrupted.py", "VERSION = 1\n")
    job.sync(project.folder)
    project.write("interrupted.py", "VERSION = 22\n")
    project.write("weights.bin", random.Random(4).randbytes(12 << 20))

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sync._Bar, "arrived", interrupt)
        with pytest.raises(KeyboardInterrupt):
            job.sync(project.folder)
    before = job.hosts.spawn_procs().spawn("before", Environment)
    result = job.sync(project.folder)
    after = job.hosts.spawn_procs().spawn("after", Environment)

    assert values(before.version_of.call("interrupted")) == [1, 1]
    assert values(after.version_of.call("interrupted")) == [22, 22]
    assert result.sent_bytes >= 12 << 20
    assert list((machines.gateway_cache / "partial").iterdir()) == []


@pytest.mark.slow
def test_two_sessions_sync_the_same_folder_at_once(machines: Machines, project: Project) -> None:
    for number in range(100):
        project.write(f"at_once_{number}.py", f"VERSION = {number}, 'at once'\n")

    def one(_: int) -> list[Any]:
        with loom.connect(machines.url, machines.token) as job:
            job.sync(project.folder)
            actors = job.hosts.spawn_procs().spawn("environment", Environment)
            return values(actors.version_of.call("at_once_7"))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(one, range(3), timeout=2 * WAIT)) == [[(7, "at once")] * 2] * 3


def test_who_attaches_later_finds_what_was_synced(machines: Machines, project: Project) -> None:
    project.write("left_behind.py", model(1))
    left_behind = project.load("left_behind")
    first = loom.connect(machines.url, machines.token)
    first.sync(project.folder)
    first.detach()

    with loom.connect(machines.url, machines.token, session=first.session) as job:
        procs = job.hosts.spawn_procs()
        found = values(procs.spawn("models", left_behind.Model).version.call())  # by value
        assert found == [1, 1]
        assert job.sync(project.folder).sent_files == 0
        imported = values(job.hosts.spawn_procs().spawn("models", left_behind.Model).imported.call())
        assert [same for _, _, same in imported] == [True, True]


def test_links_and_executable_bits_are_kept(job: loom.Job, project: Project) -> None:
    project.write("linked/__init__.py", "")
    script = project.write("linked/script.sh", "#!/bin/sh\n")
    project.write("linked/same.txt", "#!/bin/sh\n")
    script.chmod(0o755)
    (project.folder / "linked" / "link").symlink_to("script.sh")
    (project.folder / "linked" / "absolute").symlink_to(script)
    (project.folder / "here").symlink_to(".")
    job.sync(project.folder)
    actors = job.hosts.slice(hosts=1).spawn_procs().spawn("environment", Environment)

    def look(file: str) -> Any:
        return actors.run.call_one(file, "linked").get(WAIT)

    assert look("script.sh") == ("#!/bin/sh\n", True, "")
    assert look("link") == ("#!/bin/sh\n", True, "script.sh")
    assert look("absolute") == ("#!/bin/sh\n", True, "script.sh")
    if os.geteuid() != 0:
        assert look("same.txt")[1] is False


# -- caches that are lost -----------------------------------------------------------------------------------


def empty(cache: Path) -> None:
    for inside in cache.iterdir():
        shutil.rmtree(inside) if inside.is_dir() else inside.unlink()


def test_hosts_whose_caches_were_emptied_get_it_again_from_the_gateway(
    job: loom.Job, machines: Machines, project: Project
) -> None:
    project.write("emptied.py", model(1))
    emptied = project.load("emptied")
    job.sync(project.folder)
    for cache in machines.host_caches:
        empty(cache)

    with pytest.raises(loom.LoomError, match=r"gone from the cache of this host.*job\.sync again"):
        job.hosts.spawn_procs().spawn("lost", emptied.Model).version.call().get(WAIT)
    result = job.sync(project.folder)
    actors = job.hosts.spawn_procs().spawn("found", emptied.Model)

    assert result.sent_files == 0
    assert values(actors.version.call()) == [1, 1]


def test_every_cache_was_emptied(job: loom.Job, machines: Machines, project: Project) -> None:
    project.write("all_emptied.py", model(1))
    all_emptied = project.load("all_emptied")
    job.sync(project.folder)
    for cache in (machines.gateway_cache, *machines.host_caches):
        empty(cache)

    result = job.sync(project.folder)

    assert result.sent_files == 1
    assert values(job.hosts.spawn_procs().spawn("found", all_emptied.Model).version.call()) == [1, 1]


def test_a_tree_that_was_written_to_is_made_anew(job: loom.Job, machines: Machines, project: Project) -> None:
    project.write("tampered.py", "VERSION = 1\n")
    digest = job.sync(project.folder).digest
    for cache in machines.host_caches:
        inside = cache / "trees" / digest / "tampered.py"
        inside.chmod(0o644)
        inside.write_text("VERSION = 2\n")

    job.sync(project.folder)

    actors = job.hosts.spawn_procs().spawn("environment", Environment)
    assert values(actors.version_of.call("tampered")) == [1, 1]


def test_a_keeper_that_died_is_started_again(job: loom.Job, machines: Machines, project: Project) -> None:
    project.write("kept.py", "VERSION = 1\n")
    digest = job.sync(project.folder).digest
    kill_keepers(machines, digest)
    project.write("kept.py", "VERSION = 22\n")

    job.sync(project.folder)

    actors = job.hosts.spawn_procs().spawn("environment", Environment)
    assert values(actors.version_of.call("kept")) == [22, 22]


def kill_keepers(machines: Machines, digest: str) -> None:
    """End the processes that hold a tree on the hosts, and wait until they are gone."""
    locks = {str(cache / "trees" / f"{digest}.lock") for cache in machines.host_caches}
    keepers = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if locks.intersection(file.path for file in process.open_files()):
                keepers.append(process)
    assert len(keepers) == 2
    for keeper in keepers:
        keeper.kill()
    assert not psutil.wait_procs(keepers, WAIT)[1]


def test_the_helpers_are_not_among_the_meshes(job: loom.Job, project: Project) -> None:
    project.write("hidden.py", "")

    job.sync(project.folder)

    assert not job.meshes
