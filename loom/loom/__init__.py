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

from loom._version import __version__ as __version__

if TYPE_CHECKING:
    from loom.actor import Actor as Actor
    from loom.actor import Context as Context
    from loom.actor import MeshFailure as MeshFailure
    from loom.actor import ProcId as ProcId
    from loom.actor import Uid as Uid
    from loom.actor import concurrent_endpoint as concurrent_endpoint
    from loom.actor import context as context
    from loom.actor import current_actor_name as current_actor_name
    from loom.actor import current_rank as current_rank
    from loom.actor import current_size as current_size
    from loom.actor import endpoint as endpoint
    from loom.actor import get_meter as get_meter
    from loom.actor import get_or_spawn_controller as get_or_spawn_controller
    from loom.actor import returns_future as returns_future
    from loom.actor import span as span
    from loom.actor import this_host as this_host
    from loom.actor import this_proc as this_proc
    from loom.actor import traced as traced
    from loom.bootstrap import BootstrapCommand as BootstrapCommand
    from loom.bootstrap import default_bootstrap_cmd as default_bootstrap_cmd
    from loom.errors import *  # noqa: F403
    from loom.shape import Extent as Extent
    from loom.shape import Point as Point
    from loom.threadlet import Threadlet as Threadlet
    from loom_proxy.futures.future import FutureProxy as Future  # noqa: F401
    from loom_proxy.futures.future import FutureProxy as FutureProxy
    from loom_proxy.futures.waiting import as_completed as as_completed
    from loom_proxy.futures.waiting import wait as wait
    from loom_proxy.job import Job as Job
    from loom_proxy.kubernetes.job import KubernetesJob as KubernetesJob
    from loom_proxy.local import local as local
    from loom_proxy.mesh.actors import ActorMeshProxy as ActorMeshProxy
    from loom_proxy.mesh.endpoints import EndpointProxy as Endpoint  # noqa: F401
    from loom_proxy.mesh.endpoints import EndpointProxy as EndpointProxy
    from loom_proxy.mesh.procs import HostMeshProxy as HostMesh  # noqa: F401
    from loom_proxy.mesh.procs import HostMeshProxy as HostMeshProxy
    from loom_proxy.mesh.procs import ProcMeshProxy as ProcMesh  # noqa: F401
    from loom_proxy.mesh.procs import ProcMeshProxy as ProcMeshProxy
    from loom_proxy.mesh.sending import Accumulator as Accumulator
    from loom_proxy.mesh.sending import as_endpoint as as_endpoint
    from loom_proxy.mesh.sending import send as send
    from loom_proxy.mesh.values import ValueMeshProxy as ValueMesh  # noqa: F401
    from loom_proxy.mesh.values import ValueMeshProxy as ValueMeshProxy
    from loom_proxy.ports.channel import Channel as Channel
    from loom_proxy.ports.port import Port as Port
    from loom_proxy.ports.receiver import PortReceiver as PortReceiver
    from loom_proxy.remote.classes import cls as cls
    from loom_proxy.remote.classes import fn as fn
    from loom_proxy.remote.objects import RemoteFunction as RemoteFunction
    from loom_proxy.remote.objects import RemoteObject as RemoteObject
    from loom_proxy.runs import RunHandle as RunHandle
    from loom_proxy.session.open import connect as connect

_HOMES = {
    "cls": "loom_proxy.remote.classes",
    "fn": "loom_proxy.remote.classes",
    "RemoteFunction": "loom_proxy.remote.objects",
    "RemoteObject": "loom_proxy.remote.objects",
    "connect": "loom_proxy.session.open",
    "SyncResult": "loom_proxy.code_sync.folders",
    "Threadlet": "loom.threadlet",
    "Job": "loom_proxy.job",
    "local": "loom_proxy.local",
    "KubernetesJob": "loom_proxy.kubernetes.job",
    "Actor": "loom.actor",
    "endpoint": "loom.actor",
    "current_rank": "loom.actor",
    "current_size": "loom.actor",
    "HostMeshProxy": "loom_proxy.mesh.procs",
    "ProcMeshProxy": "loom_proxy.mesh.procs",
    "ActorMeshProxy": "loom_proxy.mesh.actors",
    "EndpointProxy": "loom_proxy.mesh.endpoints",
    "FutureProxy": "loom_proxy.futures.future",
    "RunHandle": "loom_proxy.runs",
    "as_completed": "loom_proxy.futures.waiting",
    "wait": "loom_proxy.futures.waiting",
    "ValueMeshProxy": "loom_proxy.mesh.values",
    "Point": "loom.shape",
    "Extent": "loom.shape",
    "BootstrapCommand": "loom.bootstrap",
    "default_bootstrap_cmd": "loom.bootstrap",
    "Context": "loom.actor",
    "MeshFailure": "loom.actor",
    "ProcId": "loom.actor",
    "Uid": "loom.actor",
    "context": "loom.actor",
    "current_actor_name": "loom.actor",
    "get_meter": "loom.actor",
    "get_or_spawn_controller": "loom.actor",
    "returns_future": "loom.actor",
    "span": "loom.actor",
    "this_host": "loom.actor",
    "this_proc": "loom.actor",
    "traced": "loom.actor",
    "HostMesh": "loom_proxy.mesh.procs",
    "ProcMesh": "loom_proxy.mesh.procs",
    "Endpoint": "loom_proxy.mesh.endpoints",
    "Future": "loom_proxy.futures.future",
    "ValueMesh": "loom_proxy.mesh.values",
    "Accumulator": "loom_proxy.mesh.sending",
    "as_endpoint": "loom_proxy.mesh.sending",
    "send": "loom_proxy.mesh.sending",
    "concurrent_endpoint": "loom.actor",
    "Channel": "loom_proxy.ports.channel",
    "Port": "loom_proxy.ports.port",
    "PortReceiver": "loom_proxy.ports.receiver",
}

_ALIASES = {
    "HostMesh": "HostMeshProxy",
    "ProcMesh": "ProcMeshProxy",
    "Endpoint": "EndpointProxy",
    "Future": "FutureProxy",
    "ValueMesh": "ValueMeshProxy",
}
"""Monarch's names for what a program on the laptop holds proxies of."""


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        if name not in import_module("loom.errors").__all__:
            raise AttributeError(f"module 'loom' has no attribute {name!r}")
        home = "loom.errors"
    value = getattr(import_module(home), _ALIASES.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({"__version__", *_HOMES, *import_module("loom.errors").__all__})
