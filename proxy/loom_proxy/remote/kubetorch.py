"""Objects and functions that Kubetorch has deployed, called over its pod server's HTTP.

The calls are those of Kubetorch's client: ``POST {service}/{class}/{method}`` with ``{"args": […], "kwargs": {…}}``
and the header ``X-Serialization``; an error's answer has its type, text and traceback.
"""

from __future__ import annotations

import asyncio
import base64
import builtins
import http.client
import json
import pickle
import ssl
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from loom.errors import (
    EndpointNotFound,
    InvalidAddress,
    LoomError,
    RemoteException,
    Unavailable,
    UnpicklableError,
    WaitTimeout,
    WrongArguments,
)
from loom.methods import Method, function_of, methods_of, no_method
from loom.tls import client_context
from loom_proxy.futures.timeouts import check_timeout

__all__ = ["DeployedFunction", "DeployedMethod", "DeployedObject"]

SERIALIZATIONS = ("json", "pickle")


class _Service:
    """A pod server at a URL.

    Args:
        url: or what finds it out, for each call: a port that Kubetorch forwards may be another, started again.
    """

    def __init__(
        self, url: str | Callable[[], str], called: str, serialization: str, timeout: float | None
    ) -> None:
        self._find = None if isinstance(url, str) else url
        self.url = (url if isinstance(url, str) else url()).rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidAddress(f"{url!r} is no service's URL: write http://HOST:PORT or https://HOST/PATH")
        if serialization not in SERIALIZATIONS:
            raise WrongArguments(f"serialization is {serialization!r}: give 'json' or 'pickle'")
        check_timeout(timeout)
        self.called = called
        self.serialization = serialization
        self.timeout = timeout
        self.home: str | None = None
        """Module in which classes of errors are looked for."""
        self._context = client_context(None) if parts.scheme == "https" else None

    def call(self, method: str | None, args: Any, kwargs: Any, timeout: float | None) -> Any:
        """One call.

        Raises:
            Exception: what was raised there, as its own class where that is Python's or is in the module at hand.
            RemoteException: it is of another class.
            ServiceUnreachable: nobody answers, or it does not serve this.
            WaitTimeout: the answer took longer than ``timeout`` seconds.
        """
        try:
            self.url = self.url if self._find is None else self._find().rstrip("/")
        except Exception as failure:  # Kubetorch's, of a kubectl that does not forward
            raise Unavailable(
                f"Kubetorch does not reach {self.called}: {failure}", code="service_unreachable"
            ) from failure
        path = "/".join(quote(part, safe="") for part in (self.called, method) if part is not None)
        headers = {
            "Content-Type": "application/json",
            "X-Serialization": self.serialization,
            "X-Request-ID": uuid.uuid4().hex,
        }
        request = urllib.request.Request(f"{self.url}/{path}", self._body(args, kwargs), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=timeout, context=self._context) as response:
                return self._value(response.read())
        except urllib.error.HTTPError as refusal:
            error = self._error(refusal.code, refusal.read(), method)
        except (OSError, http.client.HTTPException) as failure:
            reason = getattr(failure, "reason", failure)
            if isinstance(reason, TimeoutError):
                within = "in time" if timeout is None else f"within {timeout:g} s"
                raise WaitTimeout(f"no answer from {self.url} {within}; the method may go on") from failure
            trust = "; LOOM_CA names the file of an authority of your own" * isinstance(reason, ssl.SSLError)
            raise Unavailable(
                f"no answer from {self.url} ({reason}): check the address and that the service runs{trust}",
                code="service_unreachable",
            ) from failure
        raise error

    def _body(self, args: Any, kwargs: Any) -> bytes:
        given = {"args": list(args), "kwargs": kwargs}
        try:
            if self.serialization == "pickle":
                given = {"data": base64.b64encode(pickle.dumps(given)).decode()}
            return json.dumps(given).encode()
        except (TypeError, ValueError, AttributeError, RecursionError, pickle.PicklingError) as error:
            hint = "" if self.serialization == "pickle" else "; serialization='pickle' takes more"
            raise UnpicklableError(f"an argument cannot be sent as {self.serialization}: {error}{hint}") from error

    def _value(self, body: bytes) -> Any:
        try:
            answer = json.loads(body)
        except ValueError as error:
            raise self._stranger() from error
        if self.serialization != "pickle":
            return answer
        # Of several processes, a list of what each gave.
        return [_unpickled(one) for one in answer] if isinstance(answer, list) else _unpickled(answer)

    def _error(self, status: int, body: bytes, method: str | None) -> Exception:
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            return self._stranger(status)
        if {"error_type", "message", "traceback"} <= answer.keys():
            return self._raised(answer, method)
        return Unavailable(
            f"{self.url} does not serve {self.called}: {answer.get('detail', answer)} ({status})",
            code="service_unreachable",
        )

    def _raised(self, answer: Mapping[str, Any], method: str | None) -> Exception:
        kind, text, traceback = (str(answer[key]) for key in ("error_type", "message", "traceback"))
        if kind == "HTTPException" and "not found in class" in text:
            return EndpointNotFound(f"{self.url}: {text}", code="no_such_method")
        error: Exception = RemoteException(kind, text)
        for where in (builtins, sys.modules.get(self.home or "")):
            found = getattr(where, kind, None)
            if isinstance(found, type) and issubclass(found, Exception):
                try:
                    error = found(text)
                except Exception:  # noqa: BLE001 - its constructor wants something else: the stand-in does
                    continue
                break
        error.__cause__ = RemoteException(
            kind, f"{text}\nremote traceback ({answer.get('pod_name')}):\n{traceback}"
        )
        return error

    def _stranger(self, status: int | None = None) -> LoomError:
        shown = "" if status is None else f" ({status})"
        return Unavailable(
            f"what answers at {self.url} is no pod server of Kubetorch{shown}: check the URL",
            code="service_unreachable",
        )


def _unpickled(answer: Any) -> Any:
    if not isinstance(answer, dict) or "data" not in answer:
        return answer
    return pickle.loads(base64.b64decode(answer["data"]))


class DeployedMethod:
    """A method of an object that Kubetorch has deployed, or such a function."""

    def __init__(self, service: _Service, name: str | None, method: Method | None) -> None:
        self._service = service
        self._name = name
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; ``async_`` and ``timeout`` as `loom_proxy.remote.objects.RemoteMethod`.

        With ``async_=True`` the call is made by a thread once it is awaited.

        Raises:
            Exception: as `RemoteClass.at`'s object says: Python's own and those of the class's module as they are.
            RemoteException: the method raised something of another class.
            ServiceUnreachable, WaitTimeout, UnpicklableError, WrongArguments, NoSuchMethod: it was not answered.
        """
        method, service = self._method, self._service
        async_ = kwargs.pop("async_", False) if method is None or not method.has("async_") else False
        timeout = service.timeout
        if "timeout" in kwargs and (method is None or not method.has("timeout")):
            timeout = kwargs.pop("timeout")
            check_timeout(timeout)
        if method is not None:
            method.check(args, kwargs)
        if async_:
            return self._awaited(args, kwargs, timeout)
        return service.call(self._name, args, kwargs, timeout)

    def _awaited(self, args: Any, kwargs: Any, timeout: float | None) -> Awaitable[Any]:
        return asyncio.to_thread(self._service.call, self._name, args, kwargs, timeout)

    def __repr__(self) -> str:
        name = self._service.called if self._name is None else f"{self._service.called}.{self._name}"
        return f"<remote {name} at {self._service.url}>"


class DeployedObject:
    """An object that ``kubetorch.cls`` has deployed. Its attributes are its public methods."""

    def __init__(
        self,
        url: str | Callable[[], str],
        called: str,
        target: type | str | None = None,
        serialization: str = "json",
        timeout: float | None = None,
    ) -> None:
        self._service = _Service(url, called, serialization, timeout)
        self._methods = methods_of(target) if isinstance(target, type) else None
        if isinstance(target, type):
            self._service.home = target.__module__

    def __getattr__(self, name: str) -> DeployedMethod:
        if name.startswith("__") or "_methods" not in self.__dict__:
            raise AttributeError(name)
        methods = self._methods
        if name.startswith("_") or (methods is not None and name not in methods):
            no_method(self._service.called, name, methods, exists=False)
        return DeployedMethod(self._service, name, None if methods is None else methods[name])

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(self._methods or ())})

    def __repr__(self) -> str:
        return f"<DeployedObject {self._service.called} at {self._service.url}>"


class DeployedFunction:
    """A function that ``kubetorch.fn`` has deployed."""

    def __init__(
        self,
        url: str | Callable[[], str],
        called: str,
        target: Any = None,
        serialization: str = "json",
        timeout: float | None = None,
    ) -> None:
        self._service = _Service(url, called, serialization, timeout)
        known = None if target is None or isinstance(target, str) else function_of(target)
        if known is not None:
            self._service.home = target.__module__
        self._call = DeployedMethod(self._service, None, known)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; as `DeployedMethod.__call__`."""
        return self._call(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<DeployedFunction {self._service.called} at {self._service.url}>"
