"""Running a command as a container of a pod runs: with namespaces of its own, and ended with its parent.

A pod has its own network, process ids, host name, mounts, ``/tmp``, ``/dev/shm``, ``/etc/hosts`` and
``/etc/resolv.conf``. It shares the rest of this machine's file system, which stands in for its image: no images
are pulled here, and nothing can be installed. What the machine lacks, such as the place of a volume, a pod has in
its own version of the folder that is there. With a read-only root file system it can write to its volumes only.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster.kubelet.image import Image
from tests.support.cluster.kubelet.memory import MemoryGroup
from tests.support.cluster.kubelet.rights import Rights
from tests.support.cluster.kubelet.volumes import Mount
from tests.support.cluster.network import CONTROL, Network
from tests.support.cluster.service_accounts import API_SERVICE
from tests.support.paths import ROOT

__all__ = ["ENTERING", "Sandbox", "write_image"]

ENTERING = b"enter-pod"
"""The name of the script that makes a pod's file system, before its container's command takes its place."""

SHARED_MEMORY = 64 << 20
"""Bytes of ``/dev/shm`` where no volume is, as container runtimes have it."""


def read_only_paths() -> list[str]:
    """Where Python and this checkout are. A pod sees them, even in ``/tmp``, but cannot change them."""
    here = ROOT
    needed = {str(here), sys.prefix, sys.base_prefix, *sys.path}
    found = sorted({os.path.realpath(path) for path in needed if path and os.path.isdir(path)})
    # Not those within another: they come with it.
    return [path for path in found if not any(path.startswith(other.rstrip("/") + "/") for other in found)]


def write_image(folder: Path) -> Path:
    """Write what the image of a pod brings that this machine lacks. The folder is for its PATH."""
    programs = folder / "image"
    programs.mkdir()
    uv = Path(__file__).parent.with_name("uv.py")
    (programs / "uv").write_text(f'#!/bin/sh\nexec {sys.executable} {uv} "$@"\n')
    (programs / "uv").chmod(0o755)
    return programs


def _outermost_closed(path: str) -> str:
    """The outermost folder above a path that other user ids cannot pass; empty if there is none."""
    closed = ""
    for folder in Path(path).parents:
        if not folder.stat().st_mode & 0o001:
            closed = str(folder)
    return closed


def _as_mounted(place: str, temporary: Path) -> str:
    """Where a place of the pod is until its ``/tmp`` is mounted."""
    return f"{temporary}{place.removeprefix('/tmp')}" if place.startswith("/tmp/") else place


class _Script:
    """The commands with which a pod's first process makes its file system."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        """Of the pod's files."""
        self._root = ["/"]
        """The mounts of which the image consists."""
        self.lines = ["set -e"]

    def do(self, *words: str | Path) -> None:
        self.lines.append(shlex.join(str(word) for word in words))

    def bind(self, source: str | Path, place: str | Path, read_only: bool = False) -> None:
        self.do("mount", "--bind", source, place)
        if read_only:
            self.do("mount", "-o", "remount,bind,ro", place)

    def open(self, paths: Iterable[str]) -> None:
        """Let other user ids reach places, by setting them aside and showing them again in an open folder."""
        closed = {path: _outermost_closed(path) for path in paths}
        closed = {path: folder for path, folder in closed.items() if folder}
        for path in closed:
            self.do("mkdir", "-p", f"{self._folder}/aside{path}")
            self.bind(path, f"{self._folder}/aside{path}")
        for folder in sorted(set(closed.values())):
            self.do("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", folder)
            self._root.append(folder)
        for path in closed:
            self.do("mkdir", "-p", path)
            self.bind(f"{self._folder}/aside{path}", path)

    def show(self, path: str | Path, temporary: Path, read_only: bool) -> None:
        """Show a place of this machine, also if it is in ``/tmp``, where the pod has a folder of its own."""
        place = _as_mounted(str(path), temporary)
        if place != str(path):
            self.do("mkdir", "-p", place)
        self.bind(path, place, read_only)

    def make(self, place: str) -> None:
        """Make a folder of the image, in a version of its parent that is the pod's own."""
        parent = Path(place)
        while not parent.is_dir():
            parent = parent.parent
        if str(parent) == place:
            return
        if str(parent) == "/":
            raise ValueError(f"{place} is not on this machine, and a pod cannot have it beside its root's folders")
        if not any(parent.is_relative_to(own) for own in self._root if own != "/"):
            self._root.append(str(parent))
            upper, work = f"{self._folder}/over{parent}", f"{self._folder}/work{parent}"
            self.do("mkdir", "-p", upper, work)
            # As the parent is: a new folder would be closed to all others
            self.do("chmod", f"--reference={parent}", upper)
            options = f"lowerdir={parent},upperdir={upper},workdir={work}"
            self.do("mount", "-t", "overlay", "overlay", "-o", options, parent)
        self.do("mkdir", "-p", place)

    def close_root(self, more: Iterable[str]) -> None:
        """Make the image read-only."""
        for place in (*self._root, *more):
            self.do("mount", "-o", "remount,bind,ro", place)


@dataclass(frozen=True)
class Sandbox:
    """The files of one pod.

    Args:
        network: of the cluster.
        folder: of the cluster's files.
        host: the pod's namespace in the network.
        hostname: what the pod calls itself.
        address: its own.
        namespace: in which it looks up short names.
    """

    network: Network
    folder: Path
    host: str
    hostname: str
    address: str
    namespace: str

    @property
    def own(self) -> Path:
        """All of the pod's files."""
        return self.folder / "pods" / self.host

    @property
    def home(self) -> Path:
        """The home of a pod whose image has none, which is its working folder as well."""
        return self.own / "home"

    def prepare(self) -> None:
        """Write the pod's files."""
        self.home.mkdir(parents=True)
        (self.own / "tmp").mkdir()
        (self.own / "tmp").chmod(0o1777)
        search = " ".join(f"{part}svc.cluster.local" for part in (f"{self.namespace}.", ""))
        (self.own / "resolv.conf").write_text(
            f"nameserver {CONTROL}\nsearch {search} cluster.local\noptions ndots:5 timeout:1\n"
        )
        (self.own / "hosts").write_text(f"127.0.0.1 localhost\n{self.address} {self.hostname}\n")

    def command(
        self,
        command: Sequence[str],
        working_dir: str,
        image: Image,
        rights: Rights,
        mounts: Sequence[Mount] = (),
        memory: MemoryGroup | None = None,
    ) -> list[str]:
        """The command to start in order to run one in the pod. It dies with the thread that starts it."""
        script = self._script(image, rights, mounts)
        if memory is not None:
            script.bind(memory.folder, memory.folder.parent)
        script.do("cd", working_dir)
        joined = "" if memory is None else f"echo 0 > {shlex.quote(str(memory.folder / 'cgroup.procs'))} && "
        return [
            *("setpriv", "--pdeathsig", "KILL"),
            *self.network.inside(self.host),
            # A control group comes first, so that the namespace of control groups begins there.
            *("sh", "-c", f'{joined}exec "$@"', "join"),
            *("unshare", "--mount", "--uts", "--ipc", "--pid", *(["--cgroup"] if memory else [])),
            *("--fork", "--kill-child", "--mount-proc"),
            *("sh", "-c", "\n".join([*script.lines, 'exec "$@"']), ENTERING.decode()),
            *rights.command(),
            *command,
        ]

    def _script(self, image: Image, rights: Rights, mounts: Sequence[Mount]) -> _Script:
        script = _Script(self.own)
        volume = next((one.source for one in mounts if one.place == "/tmp" and one.memory is None), None)
        temporary = volume or self.own / "tmp"
        script.open(read_only_paths())
        for path in read_only_paths():
            script.show(path, temporary, read_only=True)
        script.show(self.folder / "image", temporary, read_only=True)
        if image.working_dir:
            script.make(image.working_dir)
            script.do("chown", f"{image.user}:{image.user}", image.working_dir)
        else:
            script.show(self.home, temporary, read_only=False)
        for one in mounts:
            place = _as_mounted(one.place, temporary)
            script.make(place)
            if one.memory is not None:
                script.do("mount", "-t", "tmpfs", "-o", f"mode=1777,size={one.memory}", "tmpfs", place)
            elif place != "/tmp":
                script.bind(one.source, place, one.read_only)
        if not any(one.place == "/dev/shm" for one in mounts):
            script.do("mount", "-t", "tmpfs", "-o", f"mode=1777,size={SHARED_MEMORY}", "tmpfs", "/dev/shm")
        for name in ("resolv.conf", "hosts"):
            script.bind(self.own / name, f"/etc/{name}")
        script.do("mount", "--rbind", temporary, "/tmp")  # last: it hides the pod's files
        script.do("hostname", self.hostname)
        if rights.read_only:
            volumes = {one.place for one in mounts}
            script.close_root(["/tmp"] if "/tmp" not in volumes else [])
        return script

    def environment(self, given: dict[str, str], image: Image, rights: Rights) -> dict[str, str]:
        """All of the environment of a container with the given variables in its manifest."""
        system = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
        programs = [str(self.folder / "image"), os.path.dirname(sys.executable), *system]
        found = {
            "PATH": ":".join(programs),
            "HOME": str(self.home),
            "HOSTNAME": self.hostname,
            "LANG": "C.UTF-8",
            "KUBERNETES_SERVICE_HOST": API_SERVICE,
            "KUBERNETES_SERVICE_PORT": "443",
        }
        if image.working_dir:
            users = {image.user: image.working_dir, 0: "/root"}
            found["HOME"] = users.get(rights.user, "/")
        else:  # Kubetorch's pods have these
            found |= {"POD_NAME": self.hostname, "POD_NAMESPACE": self.namespace, "POD_IP": self.address}
        return {**found, **image.environment, **given}

    def remove(self) -> None:
        """Remove the pod's files."""
        shutil.rmtree(self.own, ignore_errors=True)
