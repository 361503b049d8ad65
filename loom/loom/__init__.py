"""Loom: drive a Monarch actor mesh inside a cluster from a laptop or a notebook.

Public names are imported when they are first used (PEP 562), so that ``import loom`` costs milliseconds and
needs neither torch nor torchmonarch::

    import loom

    class Counter(loom.Actor):
        def __init__(self, start): self.n = start
        @loom.endpoint
        def add(self, k): self.n += k; return self.n

    with loom.local(hosts=2) as job:
        counters = job.hosts.spawn_procs(per_host={"gpus": 2}).spawn("counters", Counter, 10)
        print(counters.add.call(1).get())
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from loom.actor import Actor as Actor
    from loom.actor import current_rank as current_rank
    from loom.actor import current_size as current_size
    from loom.actor import endpoint as endpoint
    from loom.errors import *  # noqa: F403
    from loom_proxy.job import Job as Job
    from loom_proxy.job import connect as connect
    from loom_proxy.local import local as local

_HOMES = {
    "connect": "loom_proxy.job",
    "Job": "loom_proxy.job",
    "local": "loom_proxy.local",
    "Actor": "loom.actor",
    "endpoint": "loom.actor",
    "current_rank": "loom.actor",
    "current_size": "loom.actor",
    "HostMeshProxy": "loom_proxy.meshes",
    "ProcMeshProxy": "loom_proxy.meshes",
    "ActorMeshProxy": "loom_proxy.meshes",
    "EndpointProxy": "loom_proxy.meshes",
    "FutureProxy": "loom_proxy.futures",
    "ValueMeshProxy": "loom_proxy.values",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        if name not in import_module("loom.errors").__all__:
            raise AttributeError(f"module 'loom' has no attribute {name!r}")
        home = "loom.errors"
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({"__version__", *_HOMES, *import_module("loom.errors").__all__})
