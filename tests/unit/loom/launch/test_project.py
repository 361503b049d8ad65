"""The packages of a project: which file names them, what travels, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from loom.errors import WrongArguments
from loom.launch.project import LARGEST, PackageFile, find_packages


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".", 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_lock_comes_before_requirements(tmp_path: Path) -> None:
    write(tmp_path, requirements_txt="a==1\n")
    found = find_packages(tmp_path)
    assert found is not None
    assert (found.kind, found.main) == (PackageFile.REQUIREMENTS, "requirements.txt")

    write(tmp_path, uv_lock="version = 1\n", pyproject_toml="[project]\n")
    found = find_packages(tmp_path)
    assert found is not None
    assert (found.kind, [name for name, _ in found.files]) == (PackageFile.UV_LOCK, ["pyproject.toml", "uv.lock"])


def test_equal_files_have_equal_digests_and_others_have_not(tmp_path: Path) -> None:
    one, same = (find_packages(write(tmp_path / name, requirements_txt="a==1\n")) for name in ("x", "y"))
    other = find_packages(write(tmp_path / "z", requirements_txt="a==2\n"))
    assert one
    assert same
    assert other
    assert one.digest == same.digest != other.digest


def test_included_requirements_travel_too_and_count(tmp_path: Path) -> None:
    write(tmp_path, requirements_txt="-r more/base.txt\n--constraint=limits.txt\n-r https://x/y.txt\n")
    write(tmp_path, limits_txt="a<2\n", more__base_txt="a\n-r ../requirements.txt\n")
    found = find_packages(tmp_path)
    assert found is not None
    assert [name for name, _ in found.files] == ["limits.txt", "more/base.txt", "requirements.txt"]
    before = found.digest
    write(tmp_path, more__base_txt="a==1\n")
    again = find_packages(tmp_path)
    assert again is not None
    assert again.digest != before


def test_a_workspace_s_members_travel_without_being_installed(tmp_path: Path) -> None:
    lock = 'source = { editable = "." }\nsource = { editable = "packages/part" }\nsource = { virtual = "tool" }\n'
    write(tmp_path, uv_lock=lock, pyproject_toml="[project]\n", packages__part__pyproject_toml="[project]\n")
    found = find_packages(tmp_path)
    assert found is not None
    assert found.members == ("packages/part", "tool")
    assert [name for name, _ in found.files] == ["pyproject.toml", "uv.lock", "packages/part/pyproject.toml"]


@pytest.mark.parametrize("name", ["conda-lock.yml", "environment.yml"])
def test_conda_is_refused_by_name_with_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    for file in (None, tmp_path / name):
        with pytest.raises(WrongArguments, match=rf"{name}: Loom makes no conda .* --env none"):
            find_packages(tmp_path, file)
    write(tmp_path, requirements_txt="a\n")
    assert find_packages(tmp_path) is not None


@pytest.mark.parametrize(
    "line", ["-e .", "--editable=./part", ".", "./part", "../other[x]", "part @ file:///tmp/part"]
)
def test_requirements_that_install_folders_are_refused(tmp_path: Path, line: str) -> None:
    write(tmp_path, requirements_txt=f"# packages\na==1\n  {line}\n")
    with pytest.raises(WrongArguments, match=r"requirements.txt, line 3: .* installs a folder"):
        find_packages(tmp_path)


def test_files_that_cannot_travel_are_refused(tmp_path: Path) -> None:
    project = write(tmp_path / "project", requirements_txt="-r ../outside.txt\n", uv_lock="")
    write(tmp_path, outside_txt="a\n")
    with pytest.raises(WrongArguments, match="which is not in"):
        find_packages(project, project / "requirements.txt")
    with pytest.raises(WrongArguments, match=r"no pyproject\.toml beside it"):
        find_packages(project)
    write(project, pyproject_toml="", uv_lock='source = { directory = "../other" }\n')
    with pytest.raises(WrongArguments, match=r"installs the folder \.\./other"):
        find_packages(project)
    with pytest.raises(WrongArguments, match="is no file"):
        find_packages(project, project / "missing.txt")
    write(project, requirements_txt="-r missing.txt\n")
    with pytest.raises(WrongArguments, match="cannot be read"):
        find_packages(project, project / "requirements.txt")
    write(project, requirements_txt="#" * (LARGEST + 1))
    with pytest.raises(WrongArguments, match="over the limit"):
        find_packages(project, project / "requirements.txt")


def test_a_folder_without_a_file_brings_nothing(tmp_path: Path) -> None:
    write(tmp_path, pyproject_toml="[tool.ruff]\n")
    assert find_packages(tmp_path) is None
