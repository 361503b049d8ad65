"""`Job.sync`: a project folder on every host, for code that is imported by name."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import loom
import loom.actor
from loom import Actor, endpoint
from tests.integration.sync.projects import WAIT, Environment, Machines, Project, model, values

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


# -- what is spawned in the cluster, and before -------------------------------------------------------------


class Spawns(Actor):
    """An actor that spawns processes itself, with Monarch's own interface."""

    @endpoint
    def version_of(self, module: str) -> list[int]:
        procs = loom.actor.this_host().spawn_procs(per_host={"gpus": 1})
        return [value for _, value in procs.spawn("inside", Environment).version_of.call(module).get().items()]


def test_processes_that_a_run_spawns_have_the_folder(job: loom.Job, project: Project) -> None:
    project.write("spawned_in_a_run.py", "VERSION = 7\n" + model(7))
    spawned = project.load("spawned_in_a_run")

    def by_value(hosts: Any) -> list[int]:
        procs = hosts.spawn_procs(per_host={"gpus": 1})
        return [v for _, v in procs.spawn("inside", Environment).version_of.call("spawned_in_a_run").get().items()]

    def by_name(hosts: Any, cls: Any) -> list[int]:
        procs = hosts.spawn_procs(per_host={"gpus": 1})
        return [value for _, value in procs.spawn("model", cls).version.call().get().items()]

    job.sync(project.folder)

    assert job.run(by_value, job.hosts) == [7, 7]
    assert job.run(by_name, job.hosts, spawned.Model) == [7, 7]


class Starts(loom.Actor):
    @endpoint
    def version_of(self, module: str) -> str:
        return _version_in_a_program(module)


def _version_in_a_program(module: str) -> str:
    import subprocess

    command = [sys.executable, "-c", f"import {module}; print({module}.VERSION)"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def test_python_programs_that_runs_and_actors_start_have_the_folder(job: loom.Job, project: Project) -> None:
    for version in (1, 2):
        project.write("in_a_program.py", f"VERSION = {version}\n")
        job.sync(project.folder)
        starts = job.hosts.slice(hosts=0).spawn_procs().spawn("starts", Starts)

        assert job.run(_version_in_a_program, "in_a_program") == f"{version}\n"
        assert starts.version_of.call_one("in_a_program").get(timeout=WAIT) == f"{version}\n"


@pytest.mark.slow
def test_a_bootstrap_of_processes_that_a_run_spawns_is_imported_from_the_folder(
    job: loom.Job, project: Project
) -> None:
    project.write("boot_in_a_run.py", "import os\ndef start():\n    os.environ['STARTED_BY'] = __name__\n")
    boot = project.load("boot_in_a_run")
    job.sync(project.folder)

    def start(hosts: Any, bootstrap: Any) -> list[str]:
        procs = hosts.spawn_procs(per_host={"gpus": 1}, bootstrap=bootstrap)
        return [value for _, value in procs.spawn("inside", Environment).get.call("STARTED_BY").get().items()]

    assert job.run(start, job.hosts, boot.start) == ["boot_in_a_run"] * 2


@pytest.mark.slow
def test_processes_that_an_actor_spawns_have_the_folder(job: loom.Job, project: Project) -> None:
    project.write("spawned_by_an_actor.py", "VERSION = 8\n")
    job.sync(project.folder)
    spawns = job.hosts.slice(hosts=0).spawn_procs().spawn("spawns", Spawns)

    assert spawns.version_of.call_one("spawned_by_an_actor").get(timeout=WAIT) == [8]


def test_a_sync_names_the_meshes_that_keep_the_old_code(job: loom.Job, project: Project) -> None:
    project.write("named_meshes.py", "VERSION = 1\n")
    job.hosts.spawn_procs(name="first")
    (before,) = job.sync(project.folder).warnings
    job.hosts.spawn_procs(name="second")
    stopped = job.hosts.spawn_procs(name="stopped")
    same = job.sync(project.folder).warnings
    stopped.stop().get(timeout=WAIT)
    project.write("named_meshes.py", "VERSION = 22\n")
    (after,) = job.sync(project.folder).warnings

    assert "keep the code that they had: 'first'. Spawn them again" in before
    assert ["'first'. Spawn" in warning for warning in same] == [True]
    assert "keep the code that they had: 'first', 'second'. Spawn them again" in after


# -- modules that the cluster has not -----------------------------------------------------------------------


def test_a_module_that_the_laptop_has_and_the_cluster_has_not_is_named_with_the_cure(
    job: loom.Job, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("only_here.py", "VERSION = 7\n")
    project.load("only_here")
    cure = (
        f"Module 'only_here' is on the laptop, at {project.folder}/only_here.py, and not in the cluster: job.sync("
    )

    def version() -> int:
        return int(importlib.import_module("only_here").VERSION)

    environment = job.hosts.slice(hosts=0).spawn_procs().spawn("environment", Environment)
    with pytest.raises(loom.ActorError) as raised:
        environment.version_of.call_one("only_here").get(timeout=WAIT)
    assert cure in str(raised.value)
    assert isinstance(raised.value.exception, ModuleNotFoundError)
    assert cure in str(raised.value.exception)
    with pytest.raises(ModuleNotFoundError, match="Module 'only_here' is on the laptop"):
        job.run(version)

    job.sync(project.folder)

    assert job.run(version) == 7


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


def test_a_folder_with_every_name_of_the_standard_library_breaks_no_process(
    job: loom.Job, project: Project
) -> None:
    for name in sys.stdlib_module_names - {"test"}:
        project.write(f"{name}.py", "raise ImportError(f'{__file__} hides a module')")
    project.write("mine.py", model(1) + "VERSION = 1\ndef start():\n    pass\n")
    models = project.load("mine").Model

    def program() -> str:
        return subprocess.run([sys.executable, "-c", "import types"], capture_output=True, text=True).stderr

    warnings = job.sync(project.folder).warnings
    first, second = (job.hosts.spawn_procs(bootstrap=project.load("mine").start) for _ in range(2))

    assert any("'types' is hidden by the standard library's module" in warning for warning in warnings)
    assert values(first.spawn("models", models).version.call()) == [1, 1]
    assert values(second.spawn("environment", Environment).version_of.call("mine")) == [1, 1]
    assert job.run(lambda: importlib.import_module("statistics").mean([1, 3])) == 2
    assert job.run(program) == ""


def test_code_of_a_module_that_has_a_name_of_the_standard_library_travels_by_value(
    job: loom.Job, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("statistics.py", "def mean(values):\n    return 'mine'\n")
    monkeypatch.delitem(sys.modules, "statistics", raising=False)
    mean = project.load("statistics").mean
    job.sync(project.folder)

    assert mean([1, 3]) == job.run(mean, [1, 3]) == "mine"


@pytest.mark.slow
def test_a_package_of_tests_is_imported_by_name(job: loom.Job, project: Project) -> None:
    project.write("test/__init__.py", "VERSION = 7")
    job.sync(project.folder)

    assert values(job.hosts.spawn_procs().spawn("environment", Environment).version_of.call("test")) == [7, 7]
