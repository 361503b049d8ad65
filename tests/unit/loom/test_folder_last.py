"""The processes that Monarch starts for Loom by ``python -m`` have the current folder last on `sys.path`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

MARK = {"LOOM_FOLDER_LAST": "1"}


def path_of_a_process(folder: Path, *options: str, **variables: str) -> list[str]:
    """Return the path of a process that a stand-in for Monarch starts in a folder."""
    site = folder / "site"
    module = site / "monarch" / "_src" / "actor" / "bootstrap_main.py"
    module.parent.mkdir(parents=True)
    for package in (module.parent, *module.parents[1:3]):
        (package / "__init__.py").touch()
    module.write_text("import json, sys; print(json.dumps(sys.path))")
    line = (ROOT / "loom" / "loom_auto.pth").read_text()
    # The installed line may be that of another version.
    (site / "sitecustomize.py").write_text(f"import sys; sys.path.append({str(ROOT / 'loom')!r}); exec({line!r})")
    paths = [str(site), *filter(None, [variables.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *options, "-m", "monarch._src.actor.bootstrap_main"],
        cwd=folder,
        env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def test_the_folder_is_last(tmp_path: Path) -> None:
    for name in ("runpy", "monarch", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemError('imported')")

    path = path_of_a_process(tmp_path, **MARK)

    assert path[0] == str(tmp_path / "site")
    assert path.index(str(tmp_path)) == len(path) - 1


def test_without_the_mark_it_is_first(tmp_path: Path) -> None:
    assert path_of_a_process(tmp_path)[0] == str(tmp_path)


def test_a_folder_of_pythonpath_stays_where_it_is(tmp_path: Path) -> None:
    path = path_of_a_process(tmp_path, **MARK, PYTHONPATH=str(tmp_path))

    assert path[:2] == [str(tmp_path / "site"), str(tmp_path)]
    assert path.count(str(tmp_path)) == 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no safe path")
def test_a_safe_path_has_no_such_folder(tmp_path: Path) -> None:
    assert str(tmp_path) not in path_of_a_process(tmp_path, "-P", **MARK)
