"""Proxies of actors."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic

from loom.control.commands import Acknowledgement, plain_config
from loom.errors import EndpointNotFound
from loom.shape import Shape
from loom.signatures import CallSignature
from loom.wire.bodies import AwaitInitialized, ReconfigureActors, StopMesh
from loom.wire.plain import plain
from loom_proxy.futures.future import FutureProxy
from loom_proxy.mesh.base import WholeMesh
from loom_proxy.mesh.endpoints import EndpointProxy, NotAnEndpointProxy
from loom_proxy.mesh.values import ValueMeshProxy
from loom_proxy.remote_exec.methods import RankMethods

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")

GIVES_WAY = frozenset({"reconfigure", "exec", "shell", "copy_to", "copy_from", "forward"})
"""Names of methods that Loom adds. An endpoint of such a name, which a Monarch program may have, replaces it."""


class ActorMeshProxy(RankMethods, Generic[T]):
    """Actors of one class, one in each process; the counterpart of ``monarch.actor.ActorMesh``.

    The attributes are the actors' endpoints. ``ActorMesh[Counter]`` is a type for annotations, as Monarch's.
    """

    _NOUN = "actor"

    def __init__(
        self,
        whole: WholeMesh,
        shape: Shape | None = None,
        *,
        class_name: str,
        signatures: Mapping[str, CallSignature],
        cls: type | None = None,
    ) -> None:
        super().__init__(whole, shape)
        self._class_name = class_name
        self._signatures = signatures
        self._class = cls
        for name in GIVES_WAY & signatures.keys():
            self.__dict__[name] = EndpointProxy(self, name, signatures[name])

    def _new_with_shape(self, shape: Shape) -> ActorMeshProxy:
        return ActorMeshProxy(
            self._whole, shape, class_name=self._class_name, signatures=self._signatures, cls=self._class
        )

    def __getattr__(self, name: str) -> EndpointProxy | NotAnEndpointProxy:
        if name.startswith("__") or "_signatures" not in self.__dict__:
            raise AttributeError(name)
        signature = self._signatures.get(name)
        if signature is None:
            if self._class is not None and hasattr(self._class, name):
                return NotAnEndpointProxy(self, self._class, name)
            raise self._no_endpoint(name)
        endpoint = EndpointProxy(self, name, signature)
        self.__dict__[name] = endpoint  # later look-ups do not come here
        return endpoint

    def _no_endpoint(self, name: str) -> EndpointNotFound:
        near = difflib.get_close_matches(name, self._signatures, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        known = ", ".join(sorted(self._signatures)) or "none"
        return EndpointNotFound(f"{self._class_name} has no endpoint {name!r}{hint} Its endpoints: {known}")

    def _of(self) -> str:
        return self._class_name

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._signatures})

    @property
    def initialized(self) -> FutureProxy[Any]:
        """A future that is done, with None, once the actors have been created in the cluster."""
        # Monarch gives True for hosts and processes, but None for actors.
        return self._whole.caller.ask(AwaitInitialized(self._ident), convert=lambda _: None)

    def stop(self, reason: str = "stopped by client") -> FutureProxy[None]:
        """Stop the actors of this mesh; their processes live on.

        Returns:
            A future that is done when the actors have stopped.
        """
        reason = plain(reason, "reason")
        if self._shape == self._whole.shape:
            self._whole.caller.note_stopped(self._whole.ident)
        self._whole.caller.states.stopped(self._ident)
        return self._whole.caller.ask(StopMesh(self._ident, reason))

    def reconfigure(self, /, **config: Any) -> FutureProxy[ValueMeshProxy[Acknowledgement]]:
        """Give the training in these actors new values of its configuration, at its next step boundary.

        This sends the command of `loom_proxy.weaver.client.WeaverProxy.update_config` to the replicas in these
        actors' processes. If the actor has an endpoint ``reconfigure``, the attribute is that endpoint.

        Args:
            config: keys for which the training has handlers (`loom.Threadlet.handler`), and their values: numbers,
                texts, booleans, None, and lists and dicts of them. Numpy's numbers, paths and members of an Enum
                get their plain form.

        Returns:
            A future of each process's acknowledgement: the step, old and new values, or why it was refused.

        Raises:
            WrongArguments: there is no key, or a value is of another kind.
        """
        config = plain_config(config)
        shape = self._shape

        def read(answers: list[Any]) -> ValueMeshProxy[Acknowledgement]:
            return ValueMeshProxy(shape, [Acknowledgement.from_body(one) for one in answers])

        return self._whole.caller.ask(ReconfigureActors(self._ident, config), convert=read)

    def __repr__(self) -> str:
        part = "" if self._shape == self._whole.shape else f" of {self._whole.shape.extent}"
        return f"<ActorMeshProxy {self._whole.name!r} of {self._class_name} {self.extent}{part}>"
