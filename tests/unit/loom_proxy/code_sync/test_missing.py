"""What is said of a module that a program in the cluster did not find."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from loom_proxy.code_sync.missing import cure, cured


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on ``sys.path`` with a module, a package, and a folder without ``__init__.py``."""
    (tmp_path / "lonely.py").write_text("")
    (tmp_path / "orchard_of_mine" / "deep").mkdir(parents=True)
    (tmp_path / "orchard_of_mine" / "__init__.py").write_text("")
    (tmp_path / "orchard_of_mine" / "trees.py").write_text("")
    (tmp_path / "orchard_of_mine" / "deep" / "__init__.py").write_text("")
    (tmp_path / "bare_folder").mkdir()
    (tmp_path / "bare_folder" / "inside.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("module", "place"),
    [
        ("lonely", "lonely.py"),
        ("orchard_of_mine", "orchard_of_mine/__init__.py"),
        ("orchard_of_mine.trees", "orchard_of_mine/trees.py"),
        ("orchard_of_mine.deep", "orchard_of_mine/deep/__init__.py"),
        ("bare_folder", "bare_folder"),
        ("bare_folder.inside", "bare_folder/inside.py"),
    ],
)
@pytest.mark.parametrize("imported", [True, False])
def test_a_module_of_a_project_is_named_with_the_folder_to_sync(
    project: Path, module: str, place: str, imported: bool
) -> None:
    if imported:
        importlib.import_module(module)
    try:
        said = cure(f"ModuleNotFoundError: No module named {module!r}")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == module.partition(".")[0]]:
            del sys.modules[name]

    assert f"Module {module!r} is on the laptop, at {project}" in said
    assert not imported or str(project / place) in said
    assert f"job.sync({str(project)!r})" in said


def test_a_package_that_is_installed_here_is_to_be_installed_there() -> None:
    assert "'msgpack' is installed on the laptop and not in the cluster" in cure(
        "No module named 'msgpack.fallback'"
    )


@pytest.mark.parametrize("text", ["", "No module named 'no_such_module_anywhere'", "No module named 'sys'", "why"])
def test_nothing_is_said_of_what_is_not_here(text: str) -> None:
    assert cure(text) == ""


def test_an_exception_keeps_its_name_and_has_the_cure_in_its_text(project: Path) -> None:
    error = ModuleNotFoundError("No module named 'lonely'", name="lonely")

    cured(error)

    assert str(error).startswith("No module named 'lonely'. Module 'lonely' is on the laptop")
    assert error.name == "lonely"
