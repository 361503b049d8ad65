"""What a container may do: its ids and capabilities, as its manifest has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.cluster.kubelet.image import Image

__all__ = ["Rights"]


@dataclass(frozen=True)
class Rights:
    """The ids, groups and capabilities of a container's processes.

    Args:
        kept: the capabilities of root's that are not dropped; None if all are kept.
        grows: whether a program may have more rights than who starts it, as with ``sudo``.
    """

    user: int
    group: int
    fs_group: int | None
    kept: tuple[str, ...] | None
    grows: bool
    read_only: bool
    """Whether the root file system is."""

    @classmethod
    def of(cls, pod: Mapping[str, Any], container: Mapping[str, Any], image: Image) -> Rights:
        """The rights of a container of a pod. Raises ValueError for one that must not be root and is."""
        shared = pod.get("securityContext") or {}
        own = {**shared, **(container.get("securityContext") or {})}
        user = own.get("runAsUser", image.user)
        if own.get("runAsNonRoot") and user == 0:
            raise ValueError("container has runAsNonRoot and image will run as root")
        capabilities = own.get("capabilities") or {}
        return cls(
            user=user,
            group=own.get("runAsGroup", image.user),
            fs_group=shared.get("fsGroup"),
            kept=tuple(capabilities.get("add") or ()) if "ALL" in (capabilities.get("drop") or ()) else None,
            grows=own.get("allowPrivilegeEscalation", True),
            read_only=bool(own.get("readOnlyRootFilesystem")),
        )

    def command(self) -> list[str]:
        """The beginning of a command that runs with these rights."""
        words = ["setpriv"]
        if (self.user, self.group) != (0, 0):
            words += ["--reuid", str(self.user), "--regid", str(self.group)]
        words += ["--clear-groups"] if self.fs_group is None else ["--groups", str(self.fs_group)]
        if self.kept is not None:
            kept = ",".join(["-all", *(f"+{name.lower()}" for name in self.kept)])
            words += ["--inh-caps", "-all", "--bounding-set", kept]
        if not self.grows:
            words.append("--no-new-privs")
        return words
