"""The common base of proxies of host, proc and actor meshes.

Making a proxy never waits: the laptop gives the new mesh an id and sends the operation, and later operations name
that id. If the operation fails, all operations that depend on it fail with the same cause.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, ClassVar, TypeVar

from loom.errors import UnpicklableError
from loom.shape import MeshTrait, Shape
from loom.wire.bodies import AwaitInitialized, MakeView
from loom_proxy.futures.future import FutureProxy
from loom_proxy.notebook.html import MeshPanel, mesh_html
from loom_proxy.notebook.live import LiveHtml, Shown
from loom_proxy.session.calls import Calls

P = TypeVar("P", bound="MeshProxy")


class WholeMesh:
    """A whole mesh of the session, which its proxy and the proxies of its slices share."""

    def __init__(self, caller: Calls, ident: int, name: str, shape: Shape, procs: int | None = None) -> None:
        self.caller = caller
        self.ident = ident
        self.name = name
        self.shape = shape
        self.hosts: MeshProxy | None = None
        """The hosts of a proc mesh that this client has spawned; None for other meshes."""
        self.stopped = False
        """True if this client has stopped the whole mesh."""
        self.procs = ident if procs is None else procs
        """Id of an actor mesh's proc mesh; the mesh's own id for other kinds."""
        self._views = {shape: ident}  # ids of the parts that the driver knows, by shape
        self._lock = threading.Lock()  # held while a part is added to `_views`
        caller.wholes[ident] = self
        caller.states.add(ident, name, shape, procs)
        weakref.finalize(self, caller.states.forget, self._views).atexit = False

    def ident_of(self, shape: Shape) -> int:
        """Return the id of a part of the mesh. The first time, choose the id and send it to the driver."""
        ident = self._views.get(shape)
        if ident is None:
            with self._lock:
                ident = self._views.get(shape)
                if ident is None:
                    view = MakeView(self.ident, tuple(shape.labels), shape.offset, shape.sizes, shape.strides)
                    ident = self.caller.send(view)
                    self._views[shape] = ident
                    self.caller.states.add_part(ident, self.ident, shape)
        return ident


class MeshProxy(Shown, MeshTrait):
    """A proxy of a host, proc or actor mesh, or of a part of one."""

    # The names start with underscores because an actor's endpoints may have any other name.

    _NOUN: ClassVar[str] = ""  # word for an element of the mesh, such as ``host``

    def __init__(self, whole: WholeMesh, shape: Shape | None = None) -> None:
        self._whole = whole
        self._shape = shape if shape is not None else whole.shape

    @property
    def _ident(self) -> int:
        return self._whole.ident_of(self._shape)

    def _new_with_shape(self: P, shape: Shape) -> P:
        return type(self)(self._whole, shape)

    def __loom_reference__(self, session: object) -> int:
        self._whole.caller.check_passed(self, session)
        return self._ident

    def __reduce__(self) -> Any:
        raise UnpicklableError(
            f"{type(self).__name__} {self._whole.name!r} means something only in its own session: pass it to an "
            f"endpoint, a constructor or job.run, where it arrives as the real mesh"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MeshProxy):
            return NotImplemented
        return self._whole is other._whole and self._shape == other._shape

    def __hash__(self) -> int:
        return hash((id(self._whole), self._shape))

    @property
    def initialized(self) -> FutureProxy[bool]:
        """A future that is done, with True, once the mesh has been created in the cluster."""
        return self._whole.caller.ask(AwaitInitialized(self._ident))

    def _live(self) -> LiveHtml:
        return LiveHtml(self._repr_html_, lambda: self._whole.caller.error is not None)

    def _repr_html_(self) -> str:
        return mesh_html(self._panel())

    def _panel(self) -> MeshPanel:
        whole, shape = self._whole, self._shape
        return MeshPanel(
            whole.name,
            type(self).__name__,
            self._NOUN,
            self._of(),
            shape.extent,
            whole.shape.extent,
            whole.caller.states.of(whole.ident, shape.ranks()),
            whole.caller.error,
        )

    def _of(self) -> str:
        """Return the name of the actors' class; empty for other meshes."""
        return ""

    def __repr__(self) -> str:
        part = "" if self._shape == self._whole.shape else f" of {self._whole.shape.extent}"
        return f"<{type(self).__name__} {self._whole.name!r} {self.extent}{part}>"
