"""The laptop: programs on it reach nginx, and nothing else of the cluster."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.cluster.network import LAPTOP_SIDE, NGINX_PORT, Network
from tests.support.paths import ROOT

__all__ = ["Laptop", "real_kubectl"]

OLDEST_KUBECTL = (1, 31)
"""Older ones forward ports without WebSockets, and cannot do so here."""

_ENTER = 'mount --bind "$0/resolv.conf" /etc/resolv.conf && exec "$@"'

_KUBECONFIG = f"""apiVersion: v1
kind: Config
current-context: one-machine
contexts: [{{name: one-machine, context: {{cluster: one-machine, namespace: default, user: one}}}}]
clusters: [{{name: one-machine, cluster: {{server: "http://{LAPTOP_SIDE}:{NGINX_PORT}"}}}}]
users: [{{name: one, user: {{}}}}]
"""


@functools.cache
def real_kubectl() -> str | None:
    """Where this machine's kubectl is, if it has one that works here."""
    found = shutil.which("kubectl")
    if found is None:
        return None
    asked = [found, "version", "--client", "--output=json"]
    version = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)["clientVersion"]
    number = int(version["major"]), int(version["minor"].rstrip("+"))
    return found if number >= OLDEST_KUBECTL else None


class Laptop:
    """Starts programs on the laptop, with a home of its own, and a kubectl and a kubeconfig for the cluster.

    A program dies with the thread that started it, at the latest with the cluster.

    Args:
        kubectl: the one to use; without, a stand-in.
    """

    def __init__(self, network: Network, folder: Path, kubectl: str | None = None) -> None:
        self._network = network
        self.home = folder / "laptop"
        """The laptop's home folder: programs start there."""
        (self.home / ".kube").mkdir(parents=True)
        (self.home / ".kube" / "config").write_text(_KUBECONFIG)
        (self.home / "resolv.conf").write_text("")
        programs = self.home / "bin"
        programs.mkdir()
        here = ROOT
        stand_in = f"{sys.executable} -m tests.support.cluster.kubectl"
        (programs / "kubectl").write_text(f'#!/bin/sh\nPYTHONPATH={here} exec {kubectl or stand_in} "$@"\n')
        (programs / "kubectl").chmod(0o755)

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """All variables of a program on the laptop."""
        path = [str(self.home / "bin"), os.path.dirname(sys.executable), os.environ.get("PATH", "/usr/bin:/bin")]
        return {
            "PATH": ":".join(path),
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            # There are no Loki and no Prometheus in this cluster.
            "KT_STREAM_LOGS": "false",
            "KT_STREAM_METRICS": "false",
            "KT_NAMESPACE": "default",
            **(more or {}),
        }

    def command(self, command: Sequence[str]) -> list[str]:
        """The command to start on this machine for one to run on the laptop: it keeps its process id."""
        enter = ["unshare", "--mount", "sh", "-c", _ENTER, str(self.home)]
        return ["setpriv", "--pdeathsig", "KILL", *self._network.inside("laptop"), *enter, *command]

    def popen(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a program on the laptop; options are those of subprocess.Popen."""
        options = {"cwd": self.home, "text": True, **options}
        return subprocess.Popen(self.command(command), env=self.environment(env), **options)

    def run(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 120.0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the laptop to its end, in ``timeout`` seconds at most; its output is captured."""
        options = {"cwd": self.home, "text": True, "capture_output": True, **options}
        return subprocess.run(self.command(command), env=self.environment(env), timeout=timeout, **options)
