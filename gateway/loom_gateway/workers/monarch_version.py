"""The installed version of Monarch, and what depends on it when a worker is named.

Of torchmonarch, 0.7 and 0.8 are supported, pre-releases of 0.8 included. The driver's own differences are in
`loom_gateway.driver.monarch`.
"""

from __future__ import annotations

import functools
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
