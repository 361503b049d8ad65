"""Proxies of returned meshes, and of meshes that an earlier client has made."""

from __future__ import annotations

import weakref
from typing import Any

from loom.shape import Shape
from loom.signatures import CallSignature
from loom.wire.bodies import ListMeshes
from loom.wire.codec import Made
from loom_proxy.mesh.actors import ActorMeshProxy
from loom_proxy.mesh.base import WholeMesh
from loom_proxy.mesh.procs import HostMeshProxy, ProcMeshProxy
from loom_proxy.mesh.values import ValueMeshProxy
from loom_proxy.session.calls import Calls


def proxy_of(caller: Calls, made: Made) -> Any:
    """Return the proxy of a mesh, or of a value mesh, that came in a result."""
    labels, offset, sizes, strides = made.shape
    shape = Shape.of(tuple(labels), offset, tuple(sizes), tuple(strides))
    if made.kind == "values":
        return ValueMeshProxy(shape, made.values or [])
    whole = caller.wholes.get(made.root)
    if whole is None:
        whole = WholeMesh(caller, made.mesh, made.name, shape)
        if made.mesh < 0:
            weakref.finalize(whole, caller.forget, made.mesh)
    if made.kind == "hosts":
        return HostMeshProxy(whole, shape)
    if made.kind == "procs":
        return ProcMeshProxy(whole, shape)
    signatures = {
        label: CallSignature(f"{made.class_name}.{label}", parameters)
        for label, parameters in (made.endpoints or {}).items()
    }
    return ActorMeshProxy(whole, shape, class_name=made.class_name, signatures=signatures)


def find_meshes(caller: Calls) -> None:
    """Make proxies of the meshes of the session's earlier clients."""
    listed = caller.ask(ListMeshes()).get()
    for ident, kind, name, shape, class_name, endpoints, stopped in listed:
        if not stopped and ident not in caller.meshes:
            made = Made(kind, ident, name, shape, ident, class_name, endpoints)
            caller.meshes.add(proxy_of(caller, made))
