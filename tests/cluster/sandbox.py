"""Running a command as a container of a pod runs: with namespaces of its own, and ended with its parent.

A pod has its own network, process ids, host name, mounts, ``/tmp``, ``/dev/shm``, ``/etc/hosts`` and
``/etc/resolv.conf``, and its own home and working folder. It shares the rest of this machine's file system, which
stands in for its image: no images are pulled here.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.network import CONTROL, Network

__all__ = ["Sandbox", "shared_paths", "write_image"]

_ENTER = """
set -e
folder=$1; host=$2; work=$3; shift 3
while [ "$1" != -- ]; do
    mkdir -p "$folder$1"
    mount --rbind "$1" "$folder$1"
    shift
done
shift
mount --rbind "$folder/tmp" /tmp
mount -t tmpfs tmpfs /dev/shm
for name in resolv.conf hosts; do mount --bind "$folder/$name" "/etc/$name"; done
hostname "$host"
cd "$work"
exec "$@"
"""
"""Run as the first process of the pod. ``$folder`` holds its files."""

_UV = """#!/bin/sh
# Stands in for uv in a pod, which has no network: pip finds what is installed, and fails for what is not.
shift
action=$1; shift
for word; do
    shift
    case $word in --system|--python=*) ;; *) set -- "$@" "$word" ;; esac
done
PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore exec python3 -m pip "$action" "$@"
"""


def shared_paths(folder: Path) -> list[str]:
    """What a pod needs of this machine's ``/tmp``, of which it does not see the rest."""
    here = Path(__file__).resolve().parents[2]
    needed = {str(folder), str(here), sys.prefix, sys.base_prefix, *sys.path}
    found = sorted({os.path.realpath(path) for path in needed if path and os.path.isdir(path)})
    inside = [path for path in found if path.startswith("/tmp/")]
    # Not those within another: they come with it.
    return [path for path in inside if not any(path.startswith(other + "/") for other in inside)]


def write_image(folder: Path) -> Path:
    """Write what the image of a pod brings that this machine lacks. The folder is for its PATH."""
    programs = folder / "image"
    programs.mkdir()
    (programs / "uv").write_text(_UV)
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

    def command(self, command: Sequence[str], working_dir: str | None = None) -> list[str]:
        """The command to start in order to run one in the pod. It dies with the thread that starts it."""
        enter = ["sh", "-c", _ENTER, "enter", str(self.home.parent), self.hostname, working_dir or str(self.home),
                 *shared_paths(self.folder), "--"]  # fmt: skip
        return [
            *("setpriv", "--pdeathsig", "KILL"),
            *self.network.inside(self.host),
            *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *enter,
            *command,
        ]

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """All of the environment of a container with the given variables in its manifest."""
        programs = [str(self.folder / "image"), os.path.dirname(sys.executable), "/usr/local/sbin", "/usr/local/bin",
                    "/usr/sbin", "/usr/bin", "/sbin", "/bin"]  # fmt: skip
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
