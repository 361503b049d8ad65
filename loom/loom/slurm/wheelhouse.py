"""An environment that a node makes for itself of a folder of wheels, without internet and without a shared one.

Any Python of a node runs `run_from`, out of Loom's own wheel in the folder: this module and those that it imports
need nothing but Python's library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from loom.errors import EnvironmentFailed, LoomError
from loom.launch.environment import become_python, environment_on_this_host, usable_cache
from loom.launch.project import PackageFile, PackageList
from loom.process.error_exit import report
from loom.slurm.folder import notice_file
from loom.terminal_text import fit_line

_OURS = "monarch-loom"

_GLIBC_OF = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
"""The versions of glibc that the older tags of platforms stand for."""


def run_from(folder: str, arguments: Sequence[str]) -> NoReturn:
    """Let the Python of this node's environment take this process's place. Make the environment if it is missing.

    If it cannot be made, all nodes of the job are told to end, and why.

    Args:
        folder: the folder of wheels.
        arguments: those of Python, the last one of which is the allocation's folder.
    """
    try:
        environment = environment_on_this_host(
            packages_in(Path(folder)), usable_cache("environments", shared=False)
        )
    except (LoomError, OSError) as error:
        failure = error if isinstance(error, LoomError) else EnvironmentFailed(str(error))
        job, restart = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_RESTART_COUNT", "0")
        Path(arguments[-1], notice_file(job, restart)).write_text(f"{failure}\n")
        sys.exit(report(failure))
    if environment.tool:
        made = f"made the environment {environment.folder} by {environment.tool} in {environment.seconds:.0f} s"
        print(fit_line(made), file=sys.stderr, flush=True)  # noqa: T201 - this is the node's log
    become_python(environment, arguments)


def packages_in(folder: Path) -> PackageList:
    """Return the packages of a folder of wheels: the newest of each. Folders with equal wheels have equal lists.

    Raises:
        EnvironmentFailed: no wheel of a package fits this machine and this Python; or Loom's is not there.
    """
    wheels = sorted(folder.glob("*.whl"))
    packages: dict[str, list[Path]] = {}
    for wheel in wheels:
        packages.setdefault(re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower(), []).append(wheel)
    if _OURS not in packages:
        raise EnvironmentFailed(f"{folder} has no wheel of {_OURS}: {MAKE_IT}")
    for found in packages.values():
        reasons = [why_unfit(wheel.name) for wheel in found]
        if None not in reasons:
            raise EnvironmentFailed(
                f"{found[-1].name} in {folder} does not fit {platform.node()}: {reasons[-1]}. Put a wheel that "
                "does into the folder, or take a --container"
            )
    digest = hashlib.sha256()
    for wheel in wheels:
        digest.update(f"{wheel.name} {_checksums(wheel)}\n".encode())
    names = [f"{_OURS}[gateway]", *sorted(set(packages) - {_OURS})]
    lines = [f"# wheels {digest.hexdigest()}", "--no-index", f"--find-links {folder.absolute().as_uri()}", *names]
    main = PackageFile.REQUIREMENTS.value
    return PackageList(PackageFile.REQUIREMENTS, main, ((main, "".join(f"{one}\n" for one in lines).encode()),))


MAKE_IT = (
    "`pip download -d FOLDER 'monarch-loom[gateway]'` on a machine with internet and the same Python makes one"
)


def _checksums(wheel: Path) -> str:
    """Return the checksums of a wheel's files, of which only the list at its end is read."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return " ".join(f"{one.filename}:{one.CRC:x}" for one in archive.infolist())
    except (OSError, zipfile.BadZipFile) as error:
        raise EnvironmentFailed(f"{wheel} cannot be read: {error}. Copy it again") from error


def why_unfit(name: str) -> str | None:
    """Return why a wheel of a name is not for this machine and this Python; None if it is.

    The forms of the tags are those of https://packaging.python.org/en/latest/specifications/platform-compatibility-tags/.
    """
    parts = name.removesuffix(".whl").split("-")
    if len(parts) < 5:
        return "its name is none of a wheel"
    pythons, abis, platforms = (part.split(".") for part in parts[-3:])
    if not any(_is_for_python(python, abis) for python in pythons):
        here = ".".join(map(str, sys.version_info[:2]))
        return f"it is for {'.'.join(pythons)}-{'.'.join(abis)}, and Python is {here} there"
    reasons = [_why_unfit_platform(one) for one in platforms]
    return None if None in reasons else reasons[-1]


def _is_for_python(python: str, abis: Sequence[str]) -> bool:
    minor = sys.version_info[1]
    match = re.fullmatch(r"(py|cp)3(\d*)", python)
    if match is None:
        return False
    if match[1] == "py" or "abi3" in abis:
        return int(match[2] or 0) <= minor
    return int(match[2] or minor) == minor and ("none" in abis or f"cp3{minor}" in abis)


def _why_unfit_platform(tag: str) -> str | None:
    machine = platform.machine()
    if tag == "any":
        return None
    if not tag.endswith(f"_{machine}") or "linux" not in tag:
        return f"it is for {tag}, and the node is linux_{machine}"
    family = tag.removesuffix(f"_{machine}")
    if family == "linux":
        return None
    match = re.fullmatch(r"manylinux_(\d+)_(\d+)", family)
    needs = (int(match[1]), int(match[2])) if match else _GLIBC_OF.get(family)
    has = glibc()
    if (needs is None) != (has is None):
        return f"it is for {tag}, and the node has {'another C library' if has is None else 'glibc'}"
    if needs is not None and has is not None and needs > has:
        return f"it needs glibc {needs[0]}.{needs[1]}, and the node has {has[0]}.{has[1]}"
    return None


def glibc() -> tuple[int, int] | None:
    """Return the version of this machine's glibc; None if it has another C library."""
    try:
        match = re.fullmatch(r"glibc (\d+)\.(\d+).*", os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (ValueError, OSError):
        return None
    return (int(match[1]), int(match[2])) if match else None
