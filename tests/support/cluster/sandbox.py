"""Running a command as a container of a pod runs: with namespaces of its own, and ended with its parent.

A pod has its own network, process ids, host name, mounts, ``/tmp``, ``/dev/shm``, ``/etc/hosts`` and
``/etc/resolv.conf``, and its own home, in which it starts. It shares the rest of this machine's file system, which
stands in for its image: no images are pulled here, and nothing can be installed.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster.network import CONTROL, Network
from tests.support.paths import ROOT

__all__ = ["Sandbox", "write_image"]

_ENTER = """
set -e
folder=$1; host=$2; work=$3; shift 3
keep=$1; shift
show() {  # here, and in the pod's own /tmp
    case $1 in /tmp/*) to=$folder$1; mkdir -p "$to";; *) to=$1;; esac
    mount --bind "$1" "$to"
}
for path in "$@"; do  # a place that other user ids cannot reach is set aside, and shown again in an open one
    [ "$path" != -- ] || break
    closed=$path
    while [ "$closed" != / ]; do
        closed=$(dirname "$closed")
        case $(stat -c %A "$closed") in *[xt]) ;; *) outermost=$closed;; esac
    done
    [ -n "$outermost" ] || continue
    mkdir -p "$folder/aside$path"
    mount --bind "$path" "$folder/aside$path"
    case " $opened " in *" $outermost "*) ;; *) opened="$opened $outermost";; esac
    outermost=
done
for closed in $opened; do
    mount -t tmpfs -o mode=755 tmpfs "$closed"
done
for path in "$@"; do
    [ "$path" != -- ] || break
    if [ -d "$folder/aside$path" ]; then
        mkdir -p "$path"
        mount --bind "$folder/aside$path" "$path"
    fi
done
while [ "$1" != -- ]; do
    show "$1"
    mount -o remount,bind,ro "$to"
    shift
done
shift
show "$keep"
while [ "$1" != -- ]; do
    volume=$1 at=$2; shift 2
    parent=$at
    until [ -d "$parent" ]; do parent=$(dirname "$parent"); done
    ours=
    for own in $overlaid; do
        case $parent/ in "$own"/*) ours=yes;; esac
    done
    # The machine lacks the place: the pod has it in its own version of the parent.
    if [ "$parent" != "$at" ] && [ -z "$ours" ]; then
        overlaid="$overlaid $parent"
        mkdir -p "$folder/over$parent" "$folder/work$parent"
        mount -t overlay overlay \
            -o "lowerdir=$parent,upperdir=$folder/over$parent,workdir=$folder/work$parent" "$parent"
    fi
    mkdir -p "$at"
    mount --bind "$volume" "$at"
done
shift
mount --rbind "$folder/tmp" /tmp
mount -t tmpfs tmpfs /dev/shm
for name in resolv.conf hosts; do mount --bind "$folder/$name" "/etc/$name"; done
hostname "$host"
cd "$work"
exec "$@"
"""
"""Run as the first process of the pod. ``$folder`` holds its files, ``$keep`` those of the cluster."""


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
    (programs / "uv").write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("uv.py")} "$@"\n')
    (programs / "uv").chmod(0o755)
    return programs


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
    def home(self) -> Path:
        """The pod's files: its home, which is its working folder as well."""
        return self.folder / "pods" / self.host / "home"

    def prepare(self) -> None:
        """Write the pod's files."""
        self.home.mkdir(parents=True)
        (self.home.parent / "tmp").mkdir(mode=0o1777)
        search = " ".join(f"{part}svc.cluster.local" for part in (f"{self.namespace}.", ""))
        (self.home.parent / "resolv.conf").write_text(
            f"nameserver {CONTROL}\nsearch {search} cluster.local\noptions ndots:5 timeout:1\n"
        )
        (self.home.parent / "hosts").write_text(f"127.0.0.1 localhost\n{self.address} {self.hostname}\n")

    def command(
        self, command: Sequence[str], working_dir: str | None = None, volumes: Mapping[str, Path] | None = None
    ) -> list[str]:
        """The command to start in order to run one in the pod. It dies with the thread that starts it.

        ``volumes`` are folders by the places at which the pod has them.
        """
        mounts = [word for place, folder in (volumes or {}).items() for word in (str(folder), place)]
        enter = ["sh", "-c", _ENTER, "enter", str(self.home.parent), self.hostname, working_dir or str(self.home),
                 str(self.folder), *read_only_paths(), "--", *mounts, "--"]  # fmt: skip
        return [
            *("setpriv", "--pdeathsig", "KILL"),
            *self.network.inside(self.host),
            *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *enter,
            *command,
        ]

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """All of the environment of a container with the given variables in its manifest."""
        system = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
        programs = [str(self.folder / "image"), os.path.dirname(sys.executable), *system]
        return {
            "PATH": ":".join(programs),
            "HOME": str(self.home),
            "HOSTNAME": self.hostname,
            "LANG": "C.UTF-8",
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "KUBERNETES_SERVICE_PORT": "443",
            "POD_NAME": self.hostname,
            "POD_NAMESPACE": self.namespace,
            "POD_IP": self.address,
            **given,
        }

    def remove(self) -> None:
        """Remove the pod's files."""
        shutil.rmtree(self.home.parent, ignore_errors=True)
