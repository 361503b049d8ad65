"""Environments on a host: made once, by one process at a time, and never used half made."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

import loom
from loom.errors import EnvironmentFailed
from loom.launch import environment
from loom.launch.environment import EnvironmentEntry, bootstrap_in, enter, environment_on_this_host
from loom.launch.project import PackageFile, PackageList
from tests.support.gateways import await_true

UV = """#!/bin/sh
echo "$@" >> {log}
case "$1" in
  sync) folder=$UV_PROJECT_ENVIRONMENT;;
  venv) folder=$4;;
  pip) folder=$(dirname $(dirname $4)); read line < "$6"
    test "$line" != missing || {{ echo "no such package"; exit 3; }};;
esac
mkdir -p "$folder/bin" "$folder/lib/python{version}/site-packages"
if [ -n "{wait}" ]; then read _ < "{wait}"; fi
touch "$folder/made"
"""
"""A stand-in for uv, which writes down what it is asked for. With `wait` it waits for a writer of that pipe."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "environments"


@pytest.fixture(autouse=True)
def _releases() -> Iterator[None]:
    yield
    for descriptor in environment._holds:
        os.close(descriptor)
    environment._holds.clear()


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return install_uv(tmp_path, monkeypatch)


def install_uv(folder: Path, monkeypatch: pytest.MonkeyPatch, wait: str = "") -> Path:
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    log = folder / "log"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    (programs / "uv").write_text(UV.format(log=log, version=version, wait=wait))
    (programs / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(programs / "python"))  # beside which a real uv may lie
    return log


def packages(text: str = "a==1\n") -> PackageList:
    return PackageList(PackageFile.REQUIREMENTS, "requirements.txt", (("requirements.txt", text.encode()),))


def test_equal_packages_are_made_once(base: Path, log: Path) -> None:
    first, second = environment_on_this_host(packages(), base), environment_on_this_host(packages(), base)
    assert (first.tool, second.tool) == ("uv", "")
    assert first.folder == second.folder
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["venv", "pip"]
    assert environment_on_this_host(packages("b\n"), base).folder != first.folder
    assert environment_on_this_host(packages().digest, base).folder == first.folder


def test_a_lock_is_installed_as_it_is_without_the_project(base: Path, log: Path) -> None:
    lock = PackageList(PackageFile.UV_LOCK, "uv.lock", (("pyproject.toml", b""), ("uv.lock", b"")))
    made = environment_on_this_host(lock, base)
    assert Path(made.folder, "made").exists()
    assert log.read_text().startswith("sync --frozen --no-install-project --no-install-workspace --python ")


def test_a_failure_tells_the_tool_s_last_lines_and_leaves_nothing(base: Path, log: Path) -> None:
    for _ in range(2):
        with pytest.raises(EnvironmentFailed, match=r"`uv pip install …` ended with 3:\nno such package"):
            environment_on_this_host(packages("missing\n"), base)
    assert [path for path in base.iterdir() if path.is_dir()] == []


def test_an_environment_whose_maker_was_killed_is_made_again(base: Path, log: Path) -> None:
    made = environment_on_this_host(packages(), base)
    Path(made.folder, "loom-complete").unlink()
    Path(made.folder, "half").touch()
    for descriptor in environment._holds:
        os.close(descriptor)
    environment._holds.clear()
    with pytest.raises(EnvironmentFailed, match="gone from the cache"):
        environment_on_this_host(packages().digest, base)
    assert environment_on_this_host(packages(), base).tool == "uv"
    assert not Path(made.folder, "half").exists()


MAKE = """
import sys
from pathlib import Path
from loom.launch.environment import environment_on_this_host
from loom.launch.project import PackageFile, PackageList
sys.executable = sys.argv[2]
packages = PackageList(PackageFile.REQUIREMENTS, "requirements.txt", (("requirements.txt", b"a==1\\n"),))
made = environment_on_this_host(packages, Path(sys.argv[1]))
print(made.tool, Path(made.folder, "made").exists())
"""


def test_several_makers_make_it_once_also_if_one_is_killed(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = sys.executable
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    log = install_uv(tmp_path, monkeypatch, str(pipe))
    command = [python, "-c", MAKE, str(base), sys.executable]
    released = os.open(pipe, os.O_RDWR)
    killed = subprocess.Popen(command)
    await_true(log.exists)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    # The orphaned program holds the lock until it ends. Then the next maker begins again.
    others = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    os.write(released, b"\n" * 3)
    answers = sorted(one.communicate(timeout=30)[0].strip() for one in others)
    assert answers == ["True", "True", "uv True"]
    os.close(released)
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["venv", "venv", "pip"]


def test_those_used_longest_ago_go_except_in_use(base: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "KEPT", 1)
    used = environment_on_this_host(packages("used\n"), base)
    unused = environment_on_this_host(packages("unused\n"), base)
    os.close(environment._holds.pop())
    for age, made in ((2, used), (1, unused)):
        os.utime(f"{made.folder}.lock", (age, age))
    environment_on_this_host(packages("new\n"), base)
    assert (Path(used.folder).exists(), Path(unused.folder).exists()) == (True, False)


def test_without_uv_pip_installs_requirements_and_a_lock_is_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    lock = PackageList(PackageFile.UV_LOCK, "uv.lock", (("uv.lock", b""),))
    with pytest.raises(EnvironmentFailed, match=r"uv\.lock needs uv, which is not there: install it .*uv export"):
        environment_on_this_host(lock, base)
    (tmp_path / "python").write_text(
        '#!/bin/sh\nPATH=/usr/bin:/bin\necho "$@" >> "$0.log"\n'
        'if [ "$3" = venv ]; then mkdir -p "$4/bin"; ln -s "$0" "$4/bin/python"; fi\n'
    )
    (tmp_path / "python").chmod(0o755)
    made = environment_on_this_host(packages(), base)
    assert made.tool == "pip"
    asked = (tmp_path / "python.log").read_text()
    assert asked.startswith(f"-I -m venv {made.folder}\n")
    assert "-I -m pip install" in Path(f"{made.python}.log").read_text()


def test_a_process_that_enters_imports_from_it_and_what_follows_finds_it(
    base: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOM_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", ["/synced", *sys.path])
    monkeypatch.setattr(environment, "_entered", [])
    monkeypatch.setenv("PYTHONPATH", "/synced")
    first, second = (environment_on_this_host(packages(name)) for name in ("a\n", "b\n"))
    Path(second.packages, "brought_by_b.py").write_text("def begin():\n    global begun\n    begun = True\n")
    enter(first)
    entry = pickle.loads(pickle.dumps(EnvironmentEntry(packages("b\n").digest)))
    assert first.packages not in sys.path
    assert sys.path.index("/synced") < sys.path.index(second.packages)
    assert os.environ["PYTHONPATH"] == f"/synced{os.pathsep}{second.packages}"
    import brought_by_b  # type: ignore[import-not-found]

    bootstrap_in(entry, brought_by_b.begin)()
    assert brought_by_b.begun

    gone = pickle.loads(pickle.dumps(EnvironmentEntry("0" * 64)))
    with pytest.raises(EnvironmentFailed, match="gone from the cache"):
        bootstrap_in(gone, None)()


def test_a_python_without_loom_has_that_of_the_host_and_nothing_else_of_it(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    packages = {Path(loom.__file__).parents[1], Path(msgpack.__file__).parents[1]}
    asked = {
        "PYTHONPATH": str(Path(loom.__file__).parent / "instrument" / "site"),
        "LOOM_PACKAGES": os.pathsep.join(map(str, packages)),
    }
    program = "import loom, importlib.util; print(loom.Threadlet, importlib.util.find_spec('typer'))"
    python = str(tmp_path / "env" / "bin" / "python")
    done = subprocess.run([python, "-c", program], env=asked, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("<class 'loom.threadlet.threadlet.Threadlet'> None\n", "")
