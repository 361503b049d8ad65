"""`JobState`, the host meshes of a job by name."""

from __future__ import annotations

from collections.abc import Mapping

from loom_proxy.mesh.procs import HostMeshProxy


class JobState:
    """The state of a job: a host mesh for each name. The counterpart of the state of Monarch's ``JobTrait``.

    Args:
        meshes: the host meshes by name.
    """

    workers: HostMeshProxy
    """All hosts, unless the gateway was given names for them."""

    def __init__(self, meshes: Mapping[str, HostMeshProxy]) -> None:
        self.__dict__.update(meshes)

    def __getattr__(self, name: str) -> HostMeshProxy:
        raise AttributeError(f"this job has no host mesh {name!r}; it has {', '.join(vars(self))}")

    def __repr__(self) -> str:
        return f"<JobState {', '.join(f'{name}: {mesh.extent}' for name, mesh in vars(self).items())}>"
