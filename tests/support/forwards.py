"""``kubectl port-forward`` for tests without a cluster: the stand-in, and where it leads."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import psutil
import pytest

from loom_proxy.local import LocalCluster
from tests.support.paths import ROOT

__all__ = ["forwarding", "lead_to", "put_on_path"]


def put_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in for kubectl on PATH; the folder, with where it leads."""
    script = folder / "bin" / "kubectl"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\ncd "{ROOT}"\nexec "{sys.executable}" -m tests.support.kubectl_stand_in "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FORWARDS", str(folder))
    return folder


def lead_to(cluster: LocalCluster, folder: Path) -> str:
    """Make a service that leads to a cluster's gateway; its address."""
    place = folder / "research" / "svc" / "loom-gateway"
    place.parent.mkdir(parents=True)
    place.write_text(cluster.url.removeprefix("ws://"))
    return "kube://research/loom-gateway"


def forwarding(of: int) -> list[psutil.Process]:
    """The stand-ins for kubectl that a process has started."""
    found = []
    for child in psutil.Process(of).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, too
            if "tests.support.kubectl_stand_in" in child.cmdline():
                found.append(child)
    return found
