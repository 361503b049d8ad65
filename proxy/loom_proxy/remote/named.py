"""Objects and functions that are deployed, by their names alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from loom.errors import WrongArguments
from loom.remote_objects import Method
from loom_proxy.remote.deployments import find
from loom_proxy.remote.kubetorch import (
    DeployedFunction,
    DeployedObject,
    DeployedService,
    KubetorchFunction,
    KubetorchObject,
)
from loom_proxy.remote.objects import RemoteFunction, RemoteObject


class _Named:
    """A name. What is deployed under it is looked for at the first use."""

    _kind: str

    def __init__(self, name: str, namespace: str | None, reload_prefixes: str | Sequence[str]) -> None:
        self._name = name
        self._namespace = namespace
        self._prefixes = [reload_prefixes] if isinstance(reload_prefixes, str) else list(reload_prefixes)

    @cached_property
    def _found(self) -> Any:
        name, *rest = find(self._kind, self._name, self._namespace, self._prefixes)
        if isinstance(name, DeployedService):
            return self._served(name, *rest)
        return self._held(name, *rest)

    def _served(self, *served: Any) -> Any:
        raise NotImplementedError

    def _held(self, *held: Any) -> Any:
        raise NotImplementedError

    def to(self, *_: Any, **__: Any) -> Any:
        """Raise `WrongArguments`, since only a class or a function can be put anywhere."""
        raise WrongArguments(
            f"loom.{self._kind}({self._name!r}) is a name, and what is deployed under it is called as it is: give "
            f"the {'class' if self._kind == 'cls' else 'function'} to .to()"
        )

    def teardown(self) -> None:
        """Remove what is deployed under the name, with its pods."""
        self._found.teardown()

    def __enter__(self) -> Any:
        return self._found.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._found.__exit__(*error)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name}>"


class NamedClass(_Named):
    """The object that `loom.cls` or ``kubetorch.cls`` has deployed under a name. Its attributes are its methods."""

    _kind = "cls"

    def at(self, url: str, serialization: str = "json", timeout: float | None = None) -> DeployedObject:
        """Return the object at a URL. Arguments and errors are those of `RemoteClass.at`."""
        return DeployedObject(DeployedService(url, self._name, serialization, timeout), None)

    def _served(self, *served: Any) -> Any:
        return KubetorchObject(None, *served)

    def _held(self, *held: Any) -> Any:
        return RemoteObject(None, None, None, *held)

    def __getattr__(self, name: str) -> Any:
        """Return a method of the object.

        Raises:
            NotFound: nothing is deployed under the name.
            DeploymentFailed: Kubetorch does not tell.
            AuthenticationError: its token is not kept here.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._found, name)

    def __dir__(self) -> list[str]:
        return dir(self._found)


class NamedFunction(_Named):
    """The function that `loom.fn` or ``kubetorch.fn`` has deployed under a name."""

    _kind = "fn"

    def at(self, url: str, serialization: str = "json", timeout: float | None = None) -> DeployedFunction:
        """Return the function at a URL. Arguments and errors are those of `RemoteClass.at`."""
        return DeployedFunction(DeployedService(url, self._name, serialization, timeout), Method(self._name))

    def _served(self, *served: Any) -> Any:
        return KubetorchFunction(Method(self._name), *served)

    def _held(self, *held: Any) -> Any:
        return RemoteFunction(Method(self._name), None, *held)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. Errors are those of `NamedClass` and of `RemoteMethod`."""
        return self._found(*args, **kwargs)
