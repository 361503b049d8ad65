"""A folder of wheels, of which nodes make their environment."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

import loom
from loom.launch.environment import usable_cache
from loom.slurm import wheelhouse as module
from loom.slurm.wheelhouse import packages_in, why_unfit
from tests.support.needs import skip_because
from tests.support.package_index import build_wheel

MINOR = sys.version_info[1]
HERE = platform.machine()


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    build_wheel(tmp_path / "wheels", "0.2", "monarch_loom")
    build_wheel(tmp_path / "wheels", "1.0", "some_package")
    return tmp_path / "wheels"


def test_every_package_of_the_folder_is_installed_from_there_alone(wheels: Path) -> None:
    ((name, content),) = packages_in(wheels).files
    lines = content.decode().splitlines()
    assert name == "requirements.txt"
    assert lines[1:] == ["--no-index", f"--find-links file://{wheels}", "monarch-loom[gateway]", "some-package"]


def test_a_wheel_that_was_built_anew_makes_another_environment(wheels: Path) -> None:
    before = packages_in(wheels).digest
    assert packages_in(wheels).digest == before
    build_wheel(wheels, "1.0", "some_package", {"some_package.py": "changed = True\n"})
    assert packages_in(wheels).digest != before


def test_a_folder_without_loom_or_with_a_damaged_wheel_is_told(wheels: Path) -> None:
    (wheels / "some_package-1.0-py3-none-any.whl").write_bytes(b"cut")
    with pytest.raises(loom.EnvironmentFailed, match=r"some_package-1\.0-py3-none-any\.whl cannot be read"):
        packages_in(wheels)
    (wheels / "monarch_loom-0.2-py3-none-any.whl").unlink()
    with pytest.raises(loom.EnvironmentFailed, match="has no wheel of monarch-loom"):
        packages_in(wheels)


def test_a_wheel_for_a_newer_glibc_is_named(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "glibc", lambda: (2, 17))
    build_wheel(wheels, "2.9", "torch", tag=f"cp3{MINOR}-cp3{MINOR}-manylinux_2_28_{HERE}")
    with pytest.raises(loom.EnvironmentFailed) as raised:
        packages_in(wheels)
    assert f"torch-2.9-cp3{MINOR}-cp3{MINOR}-manylinux_2_28_{HERE}.whl in {wheels} does not fit" in str(
        raised.value
    )
    assert "it needs glibc 2.28, and the node has 2.17. Put a wheel" in str(raised.value)
    build_wheel(wheels, "2.8", "torch", tag=f"cp3{MINOR}-cp3{MINOR}-manylinux2014_{HERE}")
    assert b"\ntorch\n" in packages_in(wheels).files[0][1]


@pytest.mark.parametrize(
    ("tags", "words"),
    [
        ("py3-none-any", None),
        ("py2.py3-none-any", None),
        (f"cp3{MINOR}-cp3{MINOR}-linux_{HERE}", None),
        (f"cp38-abi3-manylinux2014_{HERE}", None),
        (f"cp3{MINOR}-cp3{MINOR}-manylinux_2_17_{HERE}.manylinux2014_{HERE}", None),
        (f"cp3{MINOR + 1}-cp3{MINOR + 1}-manylinux2014_{HERE}", f"and Python is 3.{MINOR} there"),
        ("py2-none-any", f"it is for py2-none, and Python is 3.{MINOR} there"),
        ("py3-none-win_amd64", "it is for win_amd64, and the node is linux_"),
        ("py3-none-manylinux_2_17_riscv64", "it is for manylinux_2_17_riscv64, and the node is linux_"),
        (f"py3-none-musllinux_1_2_{HERE}", "and the node has glibc"),
    ],
)
def test_the_tags_of_a_wheel_say_whether_it_fits(
    tags: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "glibc", lambda: (2, 17))
    why = why_unfit(f"name-1.0-{tags}.whl")
    assert why is None if words is None else words in (why or "")


def test_a_cache_that_another_user_has_made_before_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOM_CACHE", str(tmp_path))
    if os.geteuid() != 0:
        skip_because("only root can make another user's folder")
    os.chown(tmp_path, 4242, 4242)
    with pytest.raises(OSError, match="set LOOM_CACHE"):
        usable_cache("environments")
