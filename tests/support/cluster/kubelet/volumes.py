"""The volumes of a pod: folders with a limit, Secrets, its account's token, and claims, which outlive it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.cluster.kubelet.memory import quantity

__all__ = ["Mount", "Volumes", "bytes_on_disk"]

MEMORY = 1 << 30
"""Bytes of a volume in memory without a limit."""


@dataclass(frozen=True)
class Mount:
    """Where a container has a volume.

    Args:
        memory: bytes, of a volume in memory, which each container has for itself here.
    """

    source: Path
    place: str
    read_only: bool = False
    memory: int | None = None


class Volumes:
    """The volumes of one pod.

    Args:
        spec: the pod's.
        folder: for their files.
        claims: for the files of the namespace's claims.
        secret: the content of a Secret, or of the volume with the account's token, given its name; None if there is
            none.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        folder: Path,
        claims: Path,
        secret: Callable[[str], Mapping[str, bytes] | None],
    ) -> None:
        self._volumes = {volume["name"]: volume for volume in spec.get("volumes") or []}
        context = spec.get("securityContext") or {}
        self._fs_group = context.get("fsGroup")
        self._on_mismatch = context.get("fsGroupChangePolicy") == "OnRootMismatch"
        self._claimed: set[Path] = set()
        self._folder, self._claims = folder, claims
        self._secret = secret
        self._written: dict[str, Mapping[str, bytes]] = {}

    def mounts(self, container: Mapping[str, Any]) -> list[Mount]:
        """The volumes of a container, made if they are not there yet.

        Raises LookupError for a Secret or a claim that is missing.
        """
        found = []
        for wanted in container.get("volumeMounts") or []:
            volume = self._volumes[wanted["name"]]
            place, read_only = wanted["mountPath"].rstrip("/"), bool(wanted.get("readOnly"))
            known = volume.keys() & {"emptyDir", "secret", "projected", "persistentVolumeClaim"}
            if not known:
                raise LookupError(f'volume "{wanted["name"]}" is of a kind that is not known here')
            folder = self._folder / wanted["name"]
            memory = None
            if "persistentVolumeClaim" in volume:
                folder = self._claims / volume["persistentVolumeClaim"]["claimName"]
                if not folder.exists():
                    raise LookupError(f'persistentvolumeclaim "{folder.name}" not found')
                self._claim(folder)
            elif "secret" in volume or "projected" in volume:
                self.write_secret(wanted["name"])
                read_only = True
            else:
                own = volume["emptyDir"] or {}
                if own.get("medium") == "Memory":
                    memory = quantity(own.get("sizeLimit", MEMORY))
                self._make(folder)
            found.append(Mount(folder, place, read_only, memory))
        return found

    def _make(self, folder: Path) -> None:
        if folder.exists():
            return
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        self._give_group(folder, 0o2777)

    def _claim(self, folder: Path) -> None:
        """Give a claim the pod's group, with all that is in it, as a kubelet does when it mounts the volume."""
        if self._fs_group is None or folder in self._claimed:
            return
        self._claimed.add(folder)
        found = folder.stat()
        if self._on_mismatch and found.st_gid == self._fs_group and found.st_mode & 0o2770 == 0o2770:
            return
        for place, _, files in os.walk(folder):
            for path in (Path(place), *(Path(place, name) for name in files)):
                with contextlib.suppress(FileNotFoundError):  # another pod that has the claim removes it
                    mode = path.lstat().st_mode
                    os.chown(path, -1, self._fs_group, follow_symlinks=False)
                    if not stat.S_ISLNK(mode):
                        path.chmod(stat.S_IMODE(mode) | (0o2770 if stat.S_ISDIR(mode) else 0o660))

    def _give_group(self, folder: Path, mode: int) -> None:
        if self._fs_group is not None:
            os.chown(folder, -1, self._fs_group)
            folder.chmod(mode)

    def write_secret(self, name: str) -> None:
        """Write a volume's Secret as it is now, as a kubelet does: all its files change at once.

        Raises LookupError if it is missing, and may not be.
        """
        source = self._volumes[name].get("secret", {"secretName": name})
        content = self._secret(source["secretName"])
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        if content is None:
            if not source.get("optional") and name not in self._written:
                raise LookupError(f'secret "{source["secretName"]}" not found')
            content = self._written.get(name, {})
        if content == self._written.get(name):
            return
        version = folder / f"..{secrets.token_hex(4)}"
        version.mkdir(0o755)
        mode = source.get("defaultMode", 0o644)
        for key, value in content.items():
            (version / key).write_bytes(value)
            (version / key).chmod(mode if self._fs_group is None else mode | 0o440)
            if self._fs_group is not None:
                os.chown(version / key, -1, self._fs_group)
        old = (folder / "..data").resolve() if (folder / "..data").exists() else None
        (folder / "..new").symlink_to(version.name)
        (folder / "..new").replace(folder / "..data")
        for key in content:
            if not (folder / key).is_symlink():
                (folder / key).symlink_to(f"..data/{key}")
        for key in self._written.get(name, {}):
            if key not in content:
                (folder / key).unlink()
        if old is not None:
            shutil.rmtree(old)
        self._written[name] = content

    def write_secrets(self) -> None:
        """Write all Secrets that are mounted, as they are now."""
        for name in list(self._written):
            self.write_secret(name)

    def over_limit(self, limit: int | None, *more: Path) -> str:
        """Why the pod has to go: too much is on a volume, or in all, with other places. Empty if it is not."""
        total = sum(map(bytes_on_disk, more))
        for name, volume in self._volumes.items():
            own = volume.get("emptyDir")
            if own is None or own.get("medium") == "Memory":
                continue
            used = bytes_on_disk(self._folder / name)
            total += used
            if "sizeLimit" in own and used > quantity(own["sizeLimit"]):
                return f'Usage of EmptyDir volume "{name}" exceeds the limit "{own["sizeLimit"]}".'
        if limit is not None and total > limit:
            return f"Pod ephemeral local storage usage exceeds the total limit of containers {limit}."
        return ""


def bytes_on_disk(path: Path) -> int:
    """What a file, or a folder with all that is in it, takes of the disk. Nothing if it is not there."""
    try:
        total = path.lstat().st_blocks * 512
        if path.is_dir() and not path.is_symlink():
            total += sum(bytes_on_disk(one) for one in path.iterdir())
    except FileNotFoundError:
        return 0
    return total
