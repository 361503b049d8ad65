"""`Job.env`: the packages of a project on every host, for the processes and functions of a session."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from loom.errors import EnvironmentFailed, NotAFolder, ProtocolMismatch, WrongArguments
from loom.launch.environment import EnvironmentEntry, HostEnvironment
from loom.launch.project import PackageList, find_packages
from loom.wire.bodies import AT_EACH
from loom_proxy.mesh.procs import HostMeshProxy
from loom_proxy.runs import KnownRuns
from loom_proxy.session.calls import Calls

MESH = "loom_env"
"""The name of the processes that make environments, one on each host."""


@dataclass(frozen=True)
class JobEnvironment:
    """The environment of a session, from `Job.env`."""

    packages: PackageList
    """The files that name its packages."""
    hosts: tuple[HostEnvironment, ...]
    """The environment on each host: its ``folder``, ``python``, and the ``tool`` that has made it now."""
    seconds: float
    """Duration until all hosts had it."""

    @property
    def digest(self) -> str:
        """The SHA-256 over the files; equal ones share an environment."""
        return self.packages.digest


def packages_at(path: str | os.PathLike[str]) -> PackageList:
    """Return the packages that a folder, or a file, names.

    Raises:
        NotAFolder: there is neither.
        WrongArguments: the folder names none.
    """
    place = Path(os.path.realpath(os.fspath(path)))
    if place.is_file():
        found = find_packages(place.parent, place)
    elif place.is_dir():
        found = find_packages(place)
    else:
        raise NotAFolder(f"{path} is neither a folder nor a file")
    if found is None:
        lock = " (`uv lock` writes it from the pyproject.toml)" if (place / "pyproject.toml").is_file() else ""
        raise WrongArguments(f"{place} has neither a uv.lock{lock} nor a requirements.txt")
    return found


def check_launches(caller: Calls) -> None:
    """Raise `ProtocolMismatch` if the cluster's Loom cannot make environments."""
    if not caller.knows_launches:
        raise ProtocolMismatch(
            "the cluster's Loom is older, and brings no environments: upgrade the gateway and workers"
        )


def make_environment(
    caller: Calls, hosts: HostMeshProxy, runs: KnownRuns, path: str | os.PathLike[str]
) -> JobEnvironment:
    """Make the environment on all hosts and in the driver, with the arguments and errors of `Job.env`."""
    packages = packages_at(path)
    check_launches(caller)
    from loom.launch.ranks import EnvironmentMaker, enter_in_driver  # imports Monarch if it is there

    begun = time.monotonic()
    entering = runs.start(enter_in_driver, (packages,), {}, None, AT_EACH)
    before, caller.environment = caller.environment, None
    procs = hosts.spawn_procs(name=MESH)
    caller.environment = before
    try:
        made = list(procs.spawn(MESH, EnvironmentMaker).make.call(packages).get().values())
    finally:
        procs.stop()
    if errors := [text for _, text in made if text]:
        raise EnvironmentFailed(errors[0])
    entering.result()
    entering.forget()
    caller.environment = EnvironmentEntry(packages.digest)
    return JobEnvironment(packages, tuple(each for each, _ in made if each), time.monotonic() - begun)
