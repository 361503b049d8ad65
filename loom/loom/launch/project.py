"""`PackageList`: the packages that a project names, in the files that travel to the hosts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath

from loom.errors import WrongArguments


class PackageFile(str, Enum):
    """The file that names a project's packages."""

    UV_LOCK = "uv.lock"
    REQUIREMENTS = "requirements.txt"


CONDA_FILES = ("conda-lock.yml", "environment.yml", "environment.yaml")

LARGEST = 16 << 20
"""Bytes of one of the files, at most. The lock of a large project has one MiB."""

_LOCAL_SOURCE = re.compile(r'source = \{ (?:editable|virtual|directory) = "([^"]+)" \}')
_INCLUDE = re.compile(r"(?:-r|--requirement|-c|--constraint)[\s=]\s*(\S+)")
_FOLDER = re.compile(r"(?:-e|--editable)\b.*|\.{0,2}/.*|\.{1,2}(?:\[.*)?|file:.*|.*@\s*file:.*")


@dataclass(frozen=True)
class PackageList:
    """The files that name the packages of a project. Equal lists have equal digests."""

    kind: PackageFile
    main: str
    """The path of the file with the packages, among `files`."""
    files: tuple[tuple[str, bytes], ...]
    """Paths in the project, and contents."""
    members: tuple[str, ...] = ()
    """Folders of the project that have packages of its own, which are imported from there."""

    @property
    def digest(self) -> str:
        """The SHA-256 over all paths and contents."""
        found = hashlib.sha256(self.kind.value.encode())
        for path, content in self.files:
            found.update(f"\0{path}\0{len(content)}\0".encode() + content)
        return found.hexdigest()


def find_packages(folder: Path, file: Path | None = None) -> PackageList | None:
    """Return the packages of a project: those of ``uv.lock``, else those of ``requirements.txt``, else None.

    Args:
        folder: the project's folder.
        file: a file in it to take instead, ``uv.lock`` or one in the form of ``requirements.txt``.

    Raises:
        WrongArguments: the file is missing or installs a folder, or only conda can make the environment.
    """
    if file is None:
        file = next((one for kind in PackageFile if (one := folder / kind.value).is_file()), None)
        if file is None:
            refuse_conda(folder)
            return None
    if file.name in CONDA_FILES:
        raise _only_conda(file)
    if not file.is_file():
        raise WrongArguments(f"{file} is no file: name a uv.lock, or a file in the form of requirements.txt")
    return _of_uv(file) if file.name == PackageFile.UV_LOCK.value else _of_pip(folder, file)


def refuse_conda(folder: Path) -> None:
    """Raise `WrongArguments` if a folder names its packages for conda."""
    for name in CONDA_FILES:
        if (folder / name).is_file():
            raise _only_conda(folder / name)


def _only_conda(file: Path) -> WrongArguments:
    return WrongArguments(
        f"{file.name}: Loom makes no conda environments. Name the packages in a uv.lock (`uv lock`) or a "
        "requirements.txt, or start the workers in the conda environment and give --env none"
    )


def _of_uv(lock: Path) -> PackageList:
    project, text = lock.parent, _read(lock)
    if not (project / "pyproject.toml").is_file():
        raise WrongArguments(f"{lock} has no pyproject.toml beside it, which uv needs")
    local = sorted({"." if path == "" else path for path in _LOCAL_SOURCE.findall(text.decode())} - {"."})
    outside = [path for path in local if path.startswith(("/", ".."))]
    if outside:
        raise WrongArguments(f"{lock} installs the folder {outside[0]}, which is not in the project: publish it")
    names = ["pyproject.toml", "uv.lock", *(f"{path}/pyproject.toml" for path in local)]
    files = tuple((name, _read(project / name)) for name in names if (project / name).is_file())
    return PackageList(PackageFile.UV_LOCK, "uv.lock", files, tuple(local))


def _of_pip(folder: Path, file: Path) -> PackageList:
    root = folder if file.is_relative_to(folder) else file.parent
    found: dict[str, bytes] = {}
    waiting = [file]
    while waiting:
        path = waiting.pop()
        if not path.resolve().is_relative_to(root.resolve()):
            raise WrongArguments(f"{file.name} includes {path}, which is not in {root}")
        name = str(PurePosixPath(path.resolve().relative_to(root.resolve())))
        if name in found:
            continue
        found[name] = _read(path)
        waiting += [path.parent / included for included in _included(path.name, found[name].decode())]
    main = str(PurePosixPath(file.resolve().relative_to(root.resolve())))
    return PackageList(PackageFile.REQUIREMENTS, main, tuple(sorted(found.items())))


def _included(name: str, text: str) -> Iterator[str]:
    """Yield the files that a file of requirements includes. Raise `WrongArguments` if it installs a folder."""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if include := _INCLUDE.match(line):
            if "://" not in include[1]:
                yield include[1]
        elif _FOLDER.fullmatch(line):
            raise WrongArguments(
                f"{name}, line {number}: {line!r:.80} installs a folder. The project's own is brought anyway; "
                "list its packages (`uv pip compile pyproject.toml -o requirements.txt`), or lock them (`uv lock`)"
            )


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise WrongArguments(f"{path} has {size:,} bytes, over the limit of {LARGEST:,}")
        return path.read_bytes()
    except OSError as error:
        raise WrongArguments(f"{path} cannot be read: {error.strerror}") from None
