"""What a script is given besides the hosts: the names that it would import, and what scripts share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["Api", "DidNotRaise", "Mistake"]


class Api:
    """The public names of one side, as attributes.

    Args:
        module: ``monarch.actor`` natively, ``loom`` through Loom.
        hosts: the host mesh of that side.
        supervision_error: the class that the side raises when part of a mesh is dead.
        procs: the processes that scripts share; they are started on first use without it.
    """

    def __init__(
        self, module: ModuleType, hosts: Any, supervision_error: type[Exception], procs: Any = None
    ) -> None:
        self._module = module
        self._hosts = hosts
        self._procs = procs
        self.SupervisionError = supervision_error

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._module, name):  # Monarch has some of its names in the package only
            return getattr(importlib.import_module(self._module.__name__.partition(".")[0]), name)
        return getattr(self._module, name)

    @property
    def procs(self) -> Any:
        """Two processes on each of two hosts, shared by the scripts that break nothing."""
        if self._procs is None:
            self._procs = self._hosts.spawn_procs(per_host={"gpus": 2}, name="shared")
        return self._procs

    def close(self) -> None:
        """Stop the shared processes, if there are any."""
        if self._procs is not None:
            self._procs.stop().get(timeout=30)

    def spawn(self, cls: type, *args: Any, **kwargs: Any) -> Any:
        """Actors of a class on the shared processes."""
        return self.procs.spawn(cls.__name__.lower(), cls, *args, **kwargs)

    def raised(self, do: Callable[[], Any]) -> BaseException:
        """What calling a function raises; it has to."""
        try:
            value = do()
        except Exception as error:  # noqa: BLE001 - this is what is compared
            return error
        return DidNotRaise(type(value).__name__.removesuffix("Proxy"))

    def mistake(self, do: Callable[[], Any], part: str = "") -> Mistake:
        """What calling a function raises. Loom's text contains Monarch's, or the part of it that is given."""
        error = self.raised(do)
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        return Mistake(error, part if part and part in text else text)


class Mistake:
    """An exception of Monarch's own, on whose text a program may match."""

    def __init__(self, error: BaseException, says: str) -> None:
        self.error = error
        self.says = says


class DidNotRaise(Exception):
    """In place of the exception that a script expected."""
