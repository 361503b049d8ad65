"""Failures as messages: Monarch exceptions and unhandled faults in the form they have on the wire.

This is the only module that reads texts of Monarch's: its reports of faults, and errors that only their text
distinguishes. They are those of torchmonarch 0.7 and, as far as the tests of failures show, of 0.8.
"""

from __future__ import annotations

import logging
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import MeshFailure
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError as MonarchSupervisionError
from monarch._src.actor.actor_mesh import RootClientActor

from loom.errors import ActorError, LoomError, OperationFailed, SupervisionError, describe_error, operation_failed
from loom.wire.bodies import OperationError
from loom.wire.codec import Encoder
from loom.wire.exceptions import describe, formatted, is_plain, last_lines, set_link, text_of
from loom.wire.frames import pack_texts
from loom.wire.messages import Buffer, Message
from loom_gateway.driver.monarch.endpoint_errors import was_sent

_CAME_BACK = re.compile(
    r"undeliverable message for .*?\bdest: (?P<label>[\w-]+)<(?P<uid>\w+)>\.\S+?-(?P<rank>\d+)<"
    r".*?: (?P<why>invalid reference [^\n]+)",
    re.DOTALL,
)
"""A call that came back: the actor it was meant for, and why it was not delivered."""

_CONTROLLER = re.compile(r"The actor actor_mesh_controller_(?P<mesh>[\w-]+)<")


_SPAWN_TIMEOUT = re.compile(r"error spawning \w+ mesh: statuses: .*\bTimeout\(")

_SPAWN_FAILED = re.compile(r"error spawning actor mesh: statuses: .*?\bFailed\((?P<why>.*?)\n?\)=\d", re.DOTALL)

_PROCESS_ENDED = re.compile(r"\bprocess (?:this actor was running on|exited)\b")

_COORDINATE = re.compile(r"'([^']*)': (\d+)/(\d+)")


class Fault(NamedTuple):
    """An unhandled fault after which actors cannot answer."""

    mesh: str  # Monarch's name of the actor mesh, in lower case
    rank: int | None  # rank in the proc mesh; None for all ranks
    why: str


def read_fault(report: str) -> Fault | None:
    """Return the fault in a report of Monarch's; None if the report names no actors that cannot answer."""
    if found := _CONTROLLER.search(report):
        return Fault(found["mesh"].lower(), None, "Monarch's controller of the mesh has failed")
    if found := _CAME_BACK.search(report):
        return Fault(f"{found['label']}-{found['uid']}".lower(), int(found["rank"]), found["why"].strip())
    return None


class MeshElement(NamedTuple):
    """An element of a mesh, as Monarch's reports name it."""

    mesh: str  # mesh's name
    point: dict[str, tuple[int, int]]  # element's index in each dimension, and the dimension's size

    def is_at(self, point: Mapping[str, int]) -> bool:
        """Return whether the element is at a point of its mesh."""
        return {label: index for label, (index, _) in self.point.items()} == dict(point)


def died_with_its_process(cls: type | None, name: str, point: object) -> str:
    """Return a report like Monarch's of an actor whose process has died."""
    kind = "" if cls is None else f"{cls.__module__}.{cls.__qualname__} "
    return (
        f"The actor <root>.<{kind}{name}{point}> and all its descendants have failed:\n"
        f"  the process this actor was running on failed"
    )


def failed_element(mesh: str, report: str) -> MeshElement | None:
    """Return the element that a report names as failed, if any. ``mesh`` is Monarch's name with its suffix."""
    name = mesh.rpartition("-")[0] or mesh
    found = re.search(re.escape(name) + r"(?:-\w+)?\{([^{}]*)\}", report)
    if found is None:
        return None
    coordinates = _COORDINATE.findall(found[1])
    return MeshElement(name, {label: (int(index), int(size)) for label, index, size in coordinates})


def is_of_a_dead_process(text: str) -> bool:
    """Return whether the text of a SupervisionError says that the process of an actor has ended."""
    return _PROCESS_ENDED.search(text) is not None


def is_of_a_dead_mesh(text: str) -> bool:
    """Return whether the text of a RuntimeError says that a spawn failed because a process is dead."""
    return "on mesh with supervision events" in text


def unanswered_spawn(text: str) -> str | None:
    """Return the explanation of a spawn that a host has not answered; None if the text is of another error."""
    first = text.partition("\n")[0]  # a backtrace of Monarch's follows
    if _SPAWN_TIMEOUT.search(first) is None:
        return None
    return (
        f"a host has not answered in time: it has died, or the network to it was away when this was asked for; "
        f"if the host is there, ask again ({first})"
    )


def failed_spawn(text: str) -> str | None:
    """Return why an actor of a mesh that Monarch has not made failed; None if the text is of another error.

    Monarch makes no mesh if an actor fails while it waits for all, and then reports no fault (torchmonarch 0.7).
    """
    found = _SPAWN_FAILED.search(text)
    return None if found is None else found["why"]


def about_endpoint(text: str, asked: str, meant: str) -> str:
    """Return Monarch's text about a failed call of ``asked`` as one about ``meant``.

    A sentinel calls a method that every actor has, and Monarch's text, made in Rust, names that method.
    """
    return text.replace(f".{asked}()", f".{meant.partition('(')[0]}()")


logger = logging.getLogger(__name__)

__all__ = [
    "MonarchSupervisionError",
    "as_loom_error",
    "error_message",
    "is_monarchs",
    "raised_message",
    "replace_fault_hook",
]


def replace_fault_hook(report: Callable[[str, str], object]) -> None:
    """Make Monarch report unhandled faults, by a mesh's name and a text, instead of ending this process.

    A function of `Job.run` may assign a hook of its own, ``loom``'s or ``monarch.actor``'s. It is called besides.
    """

    def default(failure: MeshFailure) -> None: ...

    def supervise(self: RootClientActor, failure: MeshFailure) -> bool:
        report(failure.mesh_name, failure.report())
        for module in (sys.modules["loom"], monarch.actor):
            hook = vars(module).get("unhandled_fault_hook", default)
            try:
                hook(failure)
            except BaseException:  # also a SystemExit, which would end the session
                logger.exception("the hook of a function of job.run raised on %s", failure.mesh_name)
        return True

    monarch.actor.unhandled_fault_hook = default
    RootClientActor.__supervise__ = supervise


def error_message(
    ident: int, error: BaseException, rpc_ms: float, encoder: Encoder, index: int | None = None
) -> Message:
    """Return the `Kind.ERROR` message that reports an exception to the client.

    The payload has the original exception of an `ActorError`, or the user's own exception. The class, text and
    traceback travel as text in any case.
    """
    pickled: list[Buffer] = []
    texts: dict[str, object] = {}
    if isinstance(error, monarch.actor.ActorError):
        original = error.exception
        code = ActorError.code
        texts = {
            "text": error.message,
            "formatted": error.exception_formatted,
            "type": f"{type(original).__module__}.{type(original).__qualname__}",
            "original": text_of(original),
            "place": getattr(error, "place", ""),
        }
        pickled = _travelling(original, encoder, texts)
    elif isinstance(error, MonarchSupervisionError) or _is_of_a_dead_mesh(error):
        code = SupervisionError.code
        texts = {"text": str(error)}
    elif isinstance(error, ValueError | RuntimeError) and (why := unanswered_spawn(text_of(error))) is not None:
        code = SupervisionError.code
        texts = {"text": why}
    elif isinstance(error, LoomError):
        code = error.code
        texts = {"text": str(error)}
        if isinstance(error, OperationFailed):
            texts["type"] = error.built_in
    else:
        code, sent, texts = OperationFailed.code, was_sent(error), _texts(error)
        if sent or type(error).__module__.partition(".")[0] not in ("builtins", "monarch"):
            pickled = _travelling(error, encoder, texts)  # the user's own, sent to an endpoint's response port
    # Its frames hold the future, which holds the exception in Rust (torchmonarch 0.8): both would stay for ever.
    set_link(error, "__traceback__", None)
    return OperationError(rpc_ms, code, index).message(ident, [pack_texts(texts), *pickled])


def raised_message(ident: int, error: BaseException, encoder: Encoder) -> Message:
    """Return the `Kind.ERROR` message that reports the exception of a function of `Job.run` to the client."""
    if isinstance(error, LoomError) or is_monarchs(error) or not isinstance(error, Exception):
        return error_message(ident, error, 0.0, encoder)
    texts = _texts(error)
    pickled = _travelling(error, encoder, texts)
    set_link(error, "__traceback__", None)
    return OperationError(0.0, OperationFailed.code).message(ident, [pack_texts(texts), *pickled])


def _texts(error: BaseException) -> dict[str, object]:
    return {
        "text": last_lines(error),
        "formatted": formatted(error),
        "type": operation_failed("", error).built_in,
    }


def _travelling(error: BaseException, encoder: Encoder, texts: dict[str, object]) -> list[Buffer]:
    """Return the parts of an exception's own pickle. Put its description into ``texts``."""
    if is_plain(error):
        return encoder.pickled(error)
    description = dict(describe(error, encoder.pickled))
    # An older client knows only the pickle that an exception makes of itself.
    own = description.pop("own", None) or []
    texts["described"] = pickle.dumps(description)
    return list(own)


def is_monarchs(error: BaseException) -> bool:
    """Return whether an exception is of one of Monarch's classes for which Loom has one of the same name."""
    return isinstance(error, (monarch.actor.ActorError, MonarchSupervisionError))


def as_loom_error(error: Exception) -> LoomError:
    """Return an exception of the driver as a `LoomError` that explains why a mesh could not be made."""
    if isinstance(error, LoomError) and not is_monarchs(error):
        return error
    if _is_of_a_dead_mesh(error):
        return SupervisionError(str(error))
    if (why := unanswered_spawn(text_of(error))) is not None:
        return SupervisionError(why)
    return operation_failed(describe_error(error), error)


def _is_of_a_dead_mesh(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and is_of_a_dead_mesh(text_of(error))
