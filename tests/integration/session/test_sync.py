"""`Job.sync`: a project folder on every host, for code that is imported by name."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import psutil
import pytest

import loom
from loom.process.child import Child, python
from loom.process.listen import free_ports
from loom_proxy.code_sync import folders as sync
from loom_proxy.code_sync import scan as project_folder
from loom_proxy.display import progress
from loom_proxy.display.progress import Step
from loom_proxy.local import LocalCluster

WAIT = 30.0


class Machines(NamedTuple):
    """A gateway and two workers that share no cache, as if each were a machine of its own."""

    url: str
    token: str
    gateway_cache: Path
    host_caches: list[Path]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("machines")
    caches = [folder / name for name in ("gateway", "host-0", "host-1")]
    addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
    options = ["--host", "127.0.0.1", "--port", "0", *(word for a in addresses for word in ("--worker", a))]

    def environment(cache: Path) -> dict[str, str]:
        return {**os.environ, "LOOM_CACHE": str(cache), "LOOM_SYNC_LIMIT": str(64 << 20)}

    command = python("loom_gateway", *options, "--exit-with-parent")
    children = [Child("the gateway", command, environment(caches[0]))]
    for address, cache in zip(addresses, caches[1:], strict=True):
        command = python("loom_gateway.workers.host", "--address", address, "--exit-with-parent")
        children.append(Child(address, command, environment(cache)))
    try:
        ready = [child.ready.result(60) for child in children]
        yield Machines(ready[0]["url"], ready[0]["token"], caches[0], caches[1:])
    finally:
        for child in children:
            child.ask_to_end()
        for child in children:
            child.end(5.0)


@pytest.fixture
def job(machines: Machines) -> Iterator[loom.Job]:
    with loom.connect(machines.url, machines.token) as connected:
        yield connected


class Project:
    """A project folder that this process imports from, too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def write(self, path: str, text: str | bytes) -> Path:
        place = self.folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode() if isinstance(text, str) else text)
        return place

    def load(self, name: str) -> ModuleType:
        """Import a module, or import it anew."""
        importlib.invalidate_caches()
        sys.modules.pop(name, None)
        return importlib.import_module(name)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    made = Project(tmp_path / "project")
    monkeypatch.syspath_prepend(made.folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield made
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def model(version: int) -> str:
    """A module with an actor that tells what it is imported as."""
    return f"""
import sys
from loom import Actor, endpoint

class Config:
    def __init__(self, text):
        self.text = text

class Model(Actor):
    @endpoint
    def version(self):
        return {version}
    @endpoint
    def imported(self):
        module = sys.modules[type(self).__module__]
        return type(self).__module__, module.__file__, module.Model is type(self)
    @endpoint
    def is_config(self, config):
        return isinstance(config, Config)
"""


def values(future: Any) -> list[Any]:
    return list(future.get(WAIT).values())


# -- importing by name --------------------------------------------------------------------------------------


def test_a_synced_module_is_imported_by_name_on_every_host(
    job: loom.Job, machines: Machines, project: Project
) -> None:
    project.write("byname/__init__.py", "")
    project.write("byname/models.py", model(1))
    models = project.load("byname.models")

    result = job.sync(project.folder)
    actors = job.hosts.spawn_procs().spawn("models", models.Model)
    imported = values(actors.imported.call())

    assert [module for module, _, _ in imported] == ["byname.models"] * 2
    assert all(same for _, _, same in imported)
    for cache, (_, file, _) in zip(machines.host_caches, imported, strict=True):
        assert file == str(cache / "trees" / result.digest / "byname" / "models.py")


def test_an_instance_travels_by_reference_to_its_class(job: loom.Job, project: Project) -> None:
    project.write("instances.py", model(1))
    instances = project.load("instances")
    job.sync(project.folder)
    actors = job.hosts.spawn_procs().spawn("models", instances.Model)

    assert values(actors.is_config.call(instances.Config("x"))) == [True, True]


def test_a_users_bootstrap_imports_what_was_synced(job: loom.Job, project: Project) -> None:
    project.write("boot.py", "import os\ndef start():\n    os.environ['STARTED_BY'] = __name__\n")
    project.write("later.py", "import os\nasync def start():\n    os.environ['STARTED_BY'] = __name__\n")
    boot, later = project.load("boot"), project.load("later")
    job.sync(project.folder)

    for module in (boot, later):
        procs = job.hosts.spawn_procs(bootstrap=module.start)
        assert values(procs.spawn("environment", Environment).get.call("STARTED_BY")) == [module.__name__] * 2


class Environment(loom.Actor):
    """Travels by value: this module is not in a synced folder."""

    @loom.endpoint
    def get(self, name: str) -> str | None:
        return os.environ.get(name)

    @loom.endpoint
    def version_of(self, module: str) -> Any:
        return importlib.import_module(module).VERSION

    @loom.endpoint
    def path(self) -> list[str]:
        return [*sys.path, os.getcwd()]

    @loom.endpoint
    def run(self, file: str, module: str) -> tuple[str, bool, str]:
        """What is in a file beside a module: its text, whether it may be run, and where it leads."""
        place = Path(importlib.import_module(module).__file__ or "").parent / file
        return place.read_text(), os.access(place, os.X_OK), os.readlink(place) if place.is_symlink() else ""


def test_code_by_value_imports_what_was_synced(job: loom.Job, project: Project) -> None:
    project.write("constants.py", "VERSION = 7\n")
    job.sync(project.folder)

    actors = job.hosts.spawn_procs().spawn("environment", Environment)

    assert values(actors.version_of.call("constants")) == [7, 7]


def test_the_driver_imports_what_was_synced(job: loom.Job, project: Project) -> None:
    project.write("in_driver.py", "def where():\n    return __file__\n")
    in_driver = project.load("in_driver")

    result = job.sync(project.folder)

    assert result.digest in job.run(in_driver.where)


def test_the_working_directory_stays_as_it_was(job: loom.Job, project: Project) -> None:
    before = job.hosts.spawn_procs().spawn("environment", Environment).path.call().get(WAIT)
    project.write("anything.py", "")
    job.sync(project.folder)
    after = job.hosts.spawn_procs().spawn("environment", Environment).path.call().get(WAIT)

    for old, new in zip(before.values(), after.values(), strict=True):
        assert new[-1] == old[-1]
        assert new[1:] == old


# -- changes ------------------------------------------------------------------------------------------------


def test_meshes_spawned_after_a_sync_have_the_change_and_those_before_do_not(
    job: loom.Job, project: Project
) -> None:
    project.write("changing.py", model(1))
    job.sync(project.folder)
    old = job.hosts.spawn_procs().spawn("old", project.load("changing").Model)
    assert values(old.version.call()) == [1, 1]

    project.write("changing.py", model(22))
    job.sync(project.folder)
    new = job.hosts.spawn_procs().spawn("new", project.load("changing").Model)

    assert values(new.version.call()) == [22, 22]
    assert values(old.version.call()) == [1, 1]


def test_the_driver_forgets_the_older_modules(job: loom.Job, project: Project) -> None:
    project.write("run_twice.py", "def version():\n    return 1\n")
    job.sync(project.folder)
    assert job.run(project.load("run_twice").version) == 1

    project.write("run_twice.py", "def version():\n    return 22\n")
    job.sync(project.folder)

    assert job.run(project.load("run_twice").version) == 22


def test_processes_spawned_before_the_first_sync_get_code_by_value(job: loom.Job, project: Project) -> None:
    project.write("by_value.py", model(5))
    by_value = project.load("by_value")
    procs = job.hosts.spawn_procs()
    early = procs.spawn("early", by_value.Model)

    job.sync(project.folder)
    late = procs.spawn("late", by_value.Model)

    assert values(late.version.call()) == [5, 5]
    assert values(early.is_config.call(by_value.Config("x"))) == [True, True]


def test_a_module_that_is_new_in_a_later_sync_travels_by_value_to_earlier_processes(
    job: loom.Job, project: Project
) -> None:
    project.write("first.py", "")
    job.sync(project.folder)
    procs = job.hosts.spawn_procs()
    project.write("second.py", model(2))
    job.sync(project.folder)

    assert values(procs.spawn("models", project.load("second").Model).version.call()) == [2, 2]


def test_a_module_that_is_changed_but_not_reloaded_here_gives_a_warning(job: loom.Job, project: Project) -> None:
    project.write("stale.py", "VERSION = 1\n")
    stale = project.load("stale")
    assert not job.sync(project.folder).warnings
    project.write("stale.py", "VERSION = 22\n")

    (warning,) = job.sync(project.folder).warnings
    assert "importlib.reload(stale)" in warning

    project.write("stale.py", "VERSION = 333\n")
    importlib.reload(stale)
    assert not job.sync(project.folder).warnings


# -- only what is lacking -----------------------------------------------------------------------------------


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


# -- several folders ----------------------------------------------------------------------------------------


def test_of_several_folders_the_newest_comes_first(job: loom.Job, tmp_path: Path) -> None:
    one, two = Project(tmp_path / "one"), Project(tmp_path / "two")
    for number, folder in enumerate((one, two), 1):
        folder.write("common.py", f"VERSION = {number}\n")
        folder.write(f"only_in_{number}.py", f"VERSION = {number}\n")

    def versions(*modules: str) -> list[Any]:
        actors = job.hosts.slice(hosts=0).spawn_procs().spawn("environment", Environment)
        return [actors.version_of.call_one(module).get(WAIT) for module in modules]

    job.sync(one.folder)
    job.sync(two.folder)
    assert versions("common", "only_in_1", "only_in_2") == [2, 1, 2]
    assert job.run(common_version) == 2
    job.sync(one.folder)
    assert versions("common", "only_in_1", "only_in_2") == [1, 1, 2]
    assert job.run(common_version) == 1


def common_version() -> Any:
    return importlib.import_module("common").VERSION


def test_two_folders_of_one_name(job: loom.Job, tmp_path: Path) -> None:
    one, two = Project(tmp_path / "a"), Project(tmp_path / "b")
    (one.folder / "src").mkdir()
    (two.folder / "src").mkdir()
    job.sync(one.folder / "src")

    with pytest.raises(loom.SyncNameTaken, match="name="):
        job.sync(two.folder / "src")

    assert job.sync(two.folder / "src", name="other").name == "other"


def test_a_folder_that_is_a_package_is_imported_by_its_name(job: loom.Job, project: Project) -> None:
    project.write("whole_package/__init__.py", "VERSION = 9\n")
    project.write("whole_package/inner/models.py", model(3))
    models = project.load("whole_package.inner.models")

    job.sync(project.folder / "whole_package")
    procs = job.hosts.spawn_procs()

    assert values(procs.spawn("environment", Environment).version_of.call("whole_package")) == [9, 9]
    imported = values(procs.spawn("models", models.Model).imported.call())
    assert [module for module, _, _ in imported] == ["whole_package.inner.models"] * 2


def test_folders_inside_that_are_on_the_path_here_are_there(
    job: loom.Job, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("src/layout/__init__.py", "")
    project.write("src/layout/models.py", model(4))
    monkeypatch.syspath_prepend(project.folder / "src")
    models = project.load("layout.models")

    job.sync(project.folder)
    imported = values(job.hosts.spawn_procs().spawn("models", models.Model).imported.call())

    assert [(module, same) for module, _, same in imported] == [("layout.models", True)] * 2


def test_a_module_that_is_ignored_travels_by_value(job: loom.Job, project: Project) -> None:
    project.write(".gitignore", "private.py\n")
    project.write("private.py", model(6))
    private = project.load("private")

    job.sync(project.folder)
    actors = job.hosts.spawn_procs().spawn("models", private.Model)

    assert values(actors.version.call()) == [6, 6]


def test_a_session_that_did_not_sync_ships_by_value_beside_one_that_did(
    machines: Machines, job: loom.Job, project: Project
) -> None:
    project.write("both_ways.py", model(8))
    both_ways = project.load("both_ways")
    job.sync(project.folder)
    with loom.connect(machines.url, machines.token) as other:
        for _ in range(2):  # in turns: what one session decides must not stick
            by_value = other.hosts.spawn_procs().spawn("models", both_ways.Model)
            by_name = job.hosts.spawn_procs().spawn("models", both_ways.Model)

            assert values(by_value.version.call()) == [8, 8]
            assert [same for _, _, same in values(by_name.imported.call())] == [True, True]


@pytest.mark.parametrize(("module", "text"), [("tomllib", "standard library"), ("msgpack", "installed")])
def test_a_package_that_hides_another_gives_a_warning(
    job: loom.Job, project: Project, module: str, text: str
) -> None:
    project.write(f"{module}/__init__.py", "")

    (warning,) = job.sync(project.folder).warnings

    assert repr(module) in warning
    assert text in warning


# -- links and modes ----------------------------------------------------------------------------------------


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


# -- bad input ----------------------------------------------------------------------------------------------


def test_a_path_that_is_no_folder(job: loom.Job, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    with pytest.raises(loom.NotAFolder, match="not there"):
        job.sync(tmp_path / "nothing")
    with pytest.raises(loom.NotAFolder, match="a file"):
        job.sync(file)


def test_a_folder_that_is_too_large_for_the_laptop(
    job: loom.Job, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("small.py", "")
    project.write("data/large.bin", bytes(5000))
    monkeypatch.setenv("LOOM_SYNC_LIMIT", "4096")

    with pytest.raises(loom.TooLarge, match=r"5000 bytes.*4096.*exclude.*data/large\.bin"):
        job.sync(project.folder)
    assert job.sync(project.folder, exclude=["*.bin"]).files == 1


def test_a_folder_that_is_too_large_for_the_cluster(job: loom.Job, project: Project) -> None:
    with project.write("sparse.bin", "").open("wb") as sparse:
        sparse.truncate(65 << 20)

    with pytest.raises(loom.TooLarge, match=r"the cluster's limit.*sparse\.bin"):
        job.sync(project.folder)


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
    job: loom.Job, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("announced.py", f"VERSION = {random.random()}\n")
    monkeypatch.setattr(project_folder, "_digest", lambda file, advance: ("0" * 64, file.size))

    with pytest.raises(loom.FileChanged, match="while it was being sent"):
        job.sync(project.folder)


def test_an_unreadable_file(job: loom.Job, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = project.write("secret.key", "x")
    open_file = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == str(secret):
            raise PermissionError(13, "Permission denied")
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)  # permissions would not stop root

    with pytest.raises(loom.UnreadableFile, match=r"secret\.key.*Permission denied"):
        job.sync(project.folder)


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
def test_arguments_of_another_kind(job: loom.Job, project: Project, arguments: Any) -> None:
    with pytest.raises(loom.WrongArguments):
        job.sync(project.folder, **arguments)


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

    steps: list[Step]
    closed: bool

    def __init__(self) -> None:
        Recorder.steps = []
        Recorder.closed = False

    def show(self, step: Step, seconds: float) -> None:
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
