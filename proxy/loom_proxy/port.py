"""The sending end of a port."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from loom.errors import OncePortUsed, UnpicklableError, WrongArguments
from loom.in_cluster import Counterpart
from loom.wire.bodies import OpenPort, SendToPort
from loom_proxy.session.calls import Calls

R = TypeVar("R")

CREDIT_MESSAGES = 16384  # messages that may wait in a receiver or be on their way to it
CREDIT_BYTES = 16 << 20  # bytes of these messages; one message may be larger


class PortLink:
    """A port of the session, which its two ends share. The driver forgets the port when both ends are garbage."""

    def __init__(self, caller: Calls, once: bool) -> None:
        self.caller = caller
        self.once = once
        self.ident = caller.send(OpenPort(once, CREDIT_MESSAGES, CREDIT_BYTES))
        self.lock = threading.Lock()
        self.used = False  # whether this program has sent to a port that takes one message
        weakref.finalize(self, caller.forget, self.ident).atexit = False


class Port(Generic[R], metaclass=Counterpart):
    """The sending end of a port; the counterpart of ``monarch.actor.Port``, as which it arrives in the cluster."""

    return_undeliverable: bool = True
    """Monarch's switch for what cannot be delivered. From the laptop that is dropped, however it is set."""

    def __init__(self, link: PortLink) -> None:
        self._link = link

    def send(self, obj: R) -> None:
        """Send an object to the receiver.

        Raises:
            OncePortUsed: the port takes one message, and this program has sent one.
            UnpicklableError: the object cannot be pickled.
        """
        self._put(obj, False)

    def exception(self, obj: Exception) -> None:
        """Send an exception, which the receiver's ``recv().get()`` raises.

        Raises:
            WrongArguments: the object is not an exception.
        """
        if not isinstance(obj, BaseException):
            raise WrongArguments(f"exception() sends an exception, not {obj!r:.80}")
        self._put(obj, True)

    def _put(self, obj: Any, is_exception: bool) -> None:
        link = self._link
        caller = link.caller
        caller.check_open()
        parts = caller.encoder.dumps(obj, "what is sent to the port")
        with link.lock:
            if link.once and link.used:
                raise OncePortUsed("this port takes one message, and it has been sent already")
            link.used = True
        caller.send(SendToPort(link.ident, is_exception), parts, link.ident)

    @property
    def _port_ref(self) -> Callable[[object], int]:
        """The argument that Monarch's ``send`` gives to an endpoint, or to a wrapper of one."""
        return self.__loom_reference__

    def __loom_reference__(self, session: object) -> int:
        self._link.caller.check_passed(self, session)
        return self._link.ident

    def __reduce__(self) -> Any:
        raise UnpicklableError(
            "a Port means something only in its own session: pass it to an endpoint, a constructor, loom.send or "
            "job.run, where it arrives as a Monarch port"
        )

    def __repr__(self) -> str:
        return f"<Port {self._link.ident} of session {self._link.caller.welcome.session!r}>"
