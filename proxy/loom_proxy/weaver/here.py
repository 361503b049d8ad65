"""`this_weaver`: the weaver for actors and for functions of `Job.run`, which need no token for it.

Their requests go to the session's actor mesh ``weaver``, in the driver, which asks the weaver with the session's
key. So they reach the replicas of the session's user and of nobody else.
"""

from __future__ import annotations

import contextvars
from typing import Any

from loom import beside
from loom.control.operations import takes
from loom.errors import WeaverUnavailable, error_for_code
from loom_proxy.weaver.methods import WeaverMethods

ANSWER_TIMEOUT = 10.0  # seconds that an answer may take on top of those for which the operation itself waits

_TRAVEL_TIMEOUT = 5.0  # seconds that a request and its answer may take between an actor and the driver


def this_weaver() -> LocalWeaver:
    """Return the weaver of this session, with the methods of `Job.weaver`.

    Call it in an actor or in a function of `Job.run`. Coroutines use the methods of ``this_weaver().aio``. Other
    threads of an actor's process may use the weaver that the actor got. It sees and commands the replicas of the
    session's user. Updates of `watch` and ``events(follow=True)`` come once a second.

    Raises:
        RuntimeError: the caller is neither an actor nor in a session's driver.
    """
    if not beside.in_driver():
        from loom.actor import in_actor  # which imports Monarch, as only the cluster needs to

        if not in_actor():
            raise RuntimeError(
                "loom.this_weaver() is for actors and for functions of job.run. A thread takes the weaver that its "
                "actor got, and a program on the laptop has job.weaver"
            )
    return LocalWeaver()


class LocalWeaver(WeaverMethods):
    """The weaver as actors and runs of a session reach it; see `this_weaver`.

    Every method raises `WeaverUnavailable` while the weaver is away, and `Denied` for a fault of the gateway's own
    processes.
    """

    def __init__(self) -> None:
        self._context = contextvars.copy_context()  # Monarch finds the calling actor in it
        super().__init__(self._ask_mesh)

    @property
    def mesh(self) -> Any:
        """The session's actor mesh ``weaver``, in its driver."""
        return self._context.copy().run(_find_mesh)

    def _ask_mesh(self, operation: str, **arguments: Any) -> Any:
        given = {name: value for name, value in arguments.items() if value is not None}
        return self._context.copy().run(_ask, operation, given, ANSWER_TIMEOUT + takes(operation, given))

    def __reduce__(self) -> tuple[Any, ...]:
        return this_weaver, ()

    def __repr__(self) -> str:
        return "<LocalWeaver>"


_mesh: Any = None  # the mesh, once it was found; a process belongs to one session


def _find_mesh() -> Any:
    global _mesh
    if _mesh is None:
        from loom.actor import get_or_spawn_controller
        from loom.weaver.server.actor import WEAVER_MESH, WeaverActor

        _mesh = get_or_spawn_controller(WEAVER_MESH, WeaverActor).get()
    return _mesh


def _ask(operation: str, arguments: dict[str, Any], timeout: float) -> Any:
    try:
        code, answer = _find_mesh().ask.call_one(operation, arguments, timeout).get(timeout + _TRAVEL_TIMEOUT)
    except TimeoutError:
        raise WeaverUnavailable(f"the session's driver did not answer within {timeout:g} s") from None
    if code is not None:
        raise error_for_code(code, answer)
    return answer
