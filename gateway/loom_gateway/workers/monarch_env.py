"""The environment of every Monarch process of Loom, and the installed version of Monarch.

Of torchmonarch, 0.7 and 0.8 are supported, pre-releases of 0.8 included. The driver's own differences are in
`loom_gateway.driver.monarch`.
"""

from __future__ import annotations

import functools
import os
import tempfile
from importlib.metadata import version

_SERVICE = "service<1>"
"""The identity of every worker's service. From 0.8 on a client has to name it. Loom gives all workers the same one,
as 0.7 does, so that a worker's address alone is enough to reach it, also after a restart."""


@functools.cache
def monarch_version() -> tuple[int, int]:
    """Return major and minor version of the installed torchmonarch, such as ``(0, 8)``.

    Raises:
        PackageNotFoundError: torchmonarch is not installed.
    """
    major, minor = version("torchmonarch").split(".")[:2]
    return int(major), int(minor)


def service_address(worker: str) -> str:
    """Return a worker's ``tcp://HOST:PORT`` in the form in which Monarch serves it and attaches to it."""
    return worker if monarch_version() < (0, 8) else f"{_SERVICE}@{worker}"


MONARCH_ENVIRONMENT = {
    # Monarch looks for dead processes every 10 s by default, but a caller should know within a second.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "250ms",
    # When a host dies, messages that it has not acknowledged (by default it waits 500 ms) are sent again to its
    # successor on the same address. The successor does not know their receivers, and messages of Monarch's
    # controllers come back to them. The controllers then end, and stop the living rest of their meshes.
    "HYPERACTOR_MESSAGE_ACK_TIME_INTERVAL": "5ms",
    # A worker may never answer a new root client, probably if an earlier one had its port; see `WorkersSilent`.
    "HYPERACTOR_MESH_ATTACH_CONFIG_TIMEOUT": "8s",
    # After a cut, Monarch goes on over a new connection, but only when it has noticed that the old one is broken.
    # By default that takes a minute if one end was reset, and as long as the cut if the network was silent.
    "HYPERACTOR_CHANNEL_TCP_KEEPALIVE_IDLE": "5s",
    # For so long it tries, or waits for, a new connection: longer than the patience with a silent host. A lost host
    # is noticed by other means.
    "HYPERACTOR_CHANNEL_RECONNECT_TIMEOUT": "1h",
    # Its file in the temporary folder, which it never shortens, would get lines about every process and call.
    "MONARCH_FILE_LOG": "error",
    # Monarch starts processes by ``python -m``, which puts the current folder first on `sys.path`. Files there may
    # have the names of modules that Loom, Monarch and torch import. With this, `loom_auto` puts the folder last.
    "LOOM_FOLDER_LAST": "1",
}
"""Variables and their values, for those that the user has not set."""


_LONGEST_FOLDER = 80
"""Bytes of the path of a folder for temporary files: Monarch's sockets in it have names of 23 bytes more."""

TORCHRUN_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables for a worker's own place among workers, which not only ``torchrun`` sets. They are wrong for the
processes that the worker starts."""


def remove_own_place() -> None:
    """Remove the variables of `TORCHRUN_PLACE`, before processes inherit them."""
    for name in TORCHRUN_PLACE:
        os.environ.pop(name, None)


def set_monarch_environment() -> None:
    """Set the variables of `MONARCH_ENVIRONMENT` that are not set. Call it before Monarch is imported.

    A ``TMPDIR`` in which Monarch would fail is replaced: one that is no folder by the one that Python takes
    instead, and one whose path is too long for a socket by ``/tmp``.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        os.environ["TMPDIR"] = "/tmp"
    elif "TMPDIR" in os.environ:
        os.environ["TMPDIR"] = folder
    for name, value in MONARCH_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
