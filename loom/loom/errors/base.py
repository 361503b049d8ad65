"""The base of Loom's exceptions, their categories, and the conversion of a code on the wire to an exception.

A category groups exceptions by what a program can do: correct a name, wait for the other side, use another token.
It defines the HTTP status and the exit status of its exceptions, unless one of them has its own. Some cases are
only an alias of their category and differ in ``code``, which the constructor takes.
"""

from __future__ import annotations

from typing import Any

_by_code: dict[str, type[LoomError]] = {}


class LoomError(Exception):
    """The base of every exception that Loom raises.

    Args:
        code: of a case without a class of its own.
    """

    code = "error"
    """Stable name of this kind of error on the wire and in REST answers."""

    http_status = 500
    """Status of the HTTP response that reports this error."""

    exit_status = 1
    """Exit code of a process that ends with this error; `SessionLost.exit_code` is that of another process."""

    def __init_subclass__(
        cls,
        code: str = "",
        cases: tuple[str, ...] = (),
        http_status: int | None = None,
        exit_status: int | None = None,
        **options: Any,
    ) -> None:
        super().__init_subclass__(**options)
        if cls.__module__.startswith("loom.errors."):
            cls.__module__ = "loom.errors"  # tracebacks show this module, and pickles for other versions name it
        cls.code = code or cls.code
        cls.http_status = http_status or cls.http_status
        cls.exit_status = exit_status or cls.exit_status
        _by_code.update(dict.fromkeys((code, *cases) if code else cases, cls))

    def __init__(self, *args: object, code: str = "") -> None:
        super().__init__(*args)
        if code:
            self.code = code

    __str__ = Exception.__str__  # KeyError's would put the text in quotes

    @classmethod
    def received(cls, message: str) -> LoomError:
        """Return the exception for a message that came over the wire."""
        return cls(message)


class Invalid(
    LoomError,
    ValueError,
    code="invalid",
    cases=(
        "not_an_actor",
        "not_one_actor",
        "unknown_selection",
        "unknown_transport",
        "unsafe_link",
        "wrong_connection_mode",
    ),
):
    """A value makes no sense; the text says which values would."""


class WrongArguments(LoomError, TypeError, code="wrong_arguments", http_status=422, exit_status=2):
    """Arguments do not fit the endpoint's or the constructor's signature. Raised before anything is sent."""


class NotFound(LoomError, KeyError, code="not_found", http_status=404, exit_status=9):
    """Nothing has the requested name or id; the text lists what exists."""


class Conflict(LoomError, code="conflict", cases=("state_folder_in_use",)):
    """Something else holds the requested resource."""


class NameTaken(
    Conflict,
    ValueError,
    code="name_taken",
    cases=("endpoint_name_taken", "object_name_taken", "run_name_taken", "sync_name_taken"),
):
    """Something else has the requested name."""


class WrongState(
    LoomError, RuntimeError, code="wrong_state", cases=("hosts_not_owned", "mesh_stopped", "no_open_job")
):
    """The request is not possible now or here; the text says why."""


class Unavailable(
    LoomError, ConnectionError, code="unavailable", cases=("service_unreachable", "port_forward_failed")
):
    """Nothing answers, or the connection to it broke."""


class Denied(LoomError, PermissionError, code="denied", http_status=403, exit_status=6):
    """The caller may not do this."""


class LimitReached(LoomError, code="limit_reached", http_status=429):
    """A limit of the gateway was reached; the text names it and its value. Nothing was begun."""


def error_for_code(code: str, message: str) -> LoomError:
    """Return the exception for an error that came over the wire.

    Codes of a newer peer that this version does not know give a plain `LoomError` with the code in its text.
    """
    cls = LoomError if code == LoomError.code else _by_code.get(code)
    if cls is None:
        return LoomError(f"{message} [{code}]")
    error = cls.received(message)
    error.code = code
    return error
