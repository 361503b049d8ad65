"""Objects and functions that Kubetorch has deployed, called over HTTP at its pod server.

The calls are those of Kubetorch's client: ``POST {service}/{class}/{method}`` with ``{"args": […], "kwargs": {…}}``
and the header ``X-Serialization``; an error's answer has its type, text and traceback.
"""

from __future__ import annotations

import asyncio
import base64
import builtins
import http.client
import json
import logging
import pickle
import ssl
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from loom.errors import (
    DeploymentFailed,
    EndpointNotFound,
    InvalidAddress,
    LoomError,
    RemoteException,
    Unavailable,
    UnpicklableError,
    WaitTimeout,
    WrongArguments,
)
from loom.remote_objects import Method, no_method
from loom.tls import client_context
from loom.wire.unpicklable import nesting
from loom_proxy.futures.timing import check_timeout
from loom_proxy.remote.objects import call_options

logger = logging.getLogger(__name__)

R = TypeVar("R", bound="_Removable")

SERIALIZATIONS = ("json", "pickle")

LOADED_WITHIN = 30.0  # seconds that a pod server has to load what it serves, after it says that it is ready
MOST_AGAIN = 2  # the number of times that a service is deployed again for one call
ASK_AGAIN = 0.2  # seconds between two requests to a pod server that is loading


class _Loading(Exception):
    """A pod server answers, and has not loaded yet what it serves."""


class DeployedService:
    """A class or a function that Kubetorch has deployed, at the URL of its pod server.

    Args:
        url: the URL; or a function that returns it for each call, since a forwarded port of Kubetorch's may change.
        target: the class or function, if this program has it. Its module is searched for classes of exceptions.
        deploy_again: deploys the service again; None if this program has not deployed it.
    """

    def __init__(
        self,
        url: str | Callable[[], str],
        called: str,
        serialization: str,
        timeout: float | None = None,
        target: Any = None,
        deploy_again: Callable[[], object] | None = None,
    ) -> None:
        self._deploy_again = deploy_again
        self._find = None if isinstance(url, str) else url
        self.url = (url if isinstance(url, str) else url()).rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidAddress(f"{url!r} is no service's URL: write http://HOST:PORT or https://HOST/PATH")
        if serialization not in SERIALIZATIONS:
            raise WrongArguments(f"serialization is {serialization!r}: give 'json' or 'pickle'")
        timeout = check_timeout(timeout)
        self.called = called
        self.serialization = serialization
        self.timeout = timeout
        self._module = sys.modules.get(getattr(target, "__module__", ""))
        self._context = client_context(None) if parts.scheme == "https" else None

    def call(self, method: str | None, args: Any, kwargs: Any, timeout: float | None) -> Any:
        """Make one call; raise the remote exception as its own class if that is known here.

        A pod server that is still loading what it serves has not begun the call, and is asked again for a while.
        Kubetorch loads it once in each deployment, and a pod in which that fails stays ready without it.
        """
        within = LOADED_WITHIN if timeout is None else min(timeout, LOADED_WITHIN)
        until, again = time.monotonic() + within, 0
        while True:
            try:
                return self._call(method, args, kwargs, timeout)
            except _Loading as loading:
                if time.monotonic() > until:
                    if self._deploy_again is None or again == MOST_AGAIN or within < LOADED_WITHIN:
                        raise _unreachable(f"{self.url} does not serve {self.called}: {loading}") from None
                    again += 1
                    logger.warning(
                        "deploying %s again (%d of at most %d times): %s", self.called, again, MOST_AGAIN, loading
                    )
                    try:
                        self._deploy_again()
                    except DeploymentFailed as error:  # not fatal: Kubetorch gives pods a minute, and they may come
                        logger.warning("%s", error)
                    until = time.monotonic() + within
            time.sleep(ASK_AGAIN)

    def _call(self, method: str | None, args: Any, kwargs: Any, timeout: float | None) -> Any:
        try:
            self.url = self.url if self._find is None else self._find().rstrip("/")
        except Exception as failure:  # Kubetorch raises errors of its own if its kubectl does not forward
            raise _unreachable(f"Kubetorch does not reach {self.called}: {failure}") from failure
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
            raise _unreachable(
                f"no answer from {self.url} ({reason}): check the address and that the service runs{trust}"
            ) from failure
        raise error

    def _body(self, args: Any, kwargs: Any) -> bytes:
        given = {"args": list(args), "kwargs": kwargs}
        try:
            if self.serialization == "pickle":
                given = {"data": base64.b64encode(pickle.dumps(given)).decode()}
            return json.dumps(given).encode()
        except RecursionError as error:
            nested = nesting([*args, *kwargs.values()], [], lambda module: False)
            raise UnpicklableError(f"an argument cannot be sent as {self.serialization}: it is {nested}") from error
        except Exception as error:  # a user's __reduce__ may raise anything
            hint = "" if self.serialization == "pickle" else "; serialization='pickle' takes more"
            raise UnpicklableError(f"an argument cannot be sent as {self.serialization}: {error}{hint}") from error

    def _value(self, body: bytes) -> Any:
        try:
            answer = json.loads(body)
        except ValueError as error:
            raise self._stranger() from error
        except RecursionError as error:
            raise UnpicklableError(f"the answer from {self.url} is nested too deeply to be read") from error
        if self.serialization != "pickle":
            return answer
        # A service of several processes gives a list of their results.
        return [_unpickled(one) for one in answer] if isinstance(answer, list) else _unpickled(answer)

    def _error(self, status: int, body: bytes, method: str | None) -> Exception:
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            return self._stranger(f" ({status})")
        if {"error_type", "message", "traceback"} <= answer.keys():
            return self._raised(answer, method)
        if status == 503 and "detail" in answer:
            return _Loading(f"{answer['detail']} (503)")
        return _unreachable(f"{self.url} does not serve {self.called}: {answer.get('detail', answer)} ({status})")

    def _raised(self, answer: Mapping[str, Any], method: str | None) -> Exception:
        kind, text, traceback = (str(answer[key]) for key in ("error_type", "message", "traceback"))
        if kind == "HTTPException" and "not found in class" in text:
            return EndpointNotFound(f"{self.url}: {text}", code="no_such_method")
        error: Exception = RemoteException(kind, text)
        for where in (builtins, self._module):
            found = getattr(where, kind, None)
            if isinstance(found, type) and issubclass(found, Exception):
                try:
                    error = found(text)
                except Exception:  # noqa: BLE001 - its constructor takes other arguments: keep the stand-in
                    continue
                break
        error.__cause__ = RemoteException(
            kind, f"{text}\nremote traceback ({answer.get('pod_name')}):\n{traceback}"
        )
        return error

    def _stranger(self, status: str = "") -> LoomError:
        return _unreachable(f"what answers at {self.url} is no pod server of Kubetorch{status}: check the URL")


def _unreachable(text: str) -> LoomError:
    return Unavailable(text, code="service_unreachable")


def _unpickled(answer: Any) -> Any:
    if not isinstance(answer, dict) or "data" not in answer:
        return answer
    return pickle.loads(base64.b64decode(answer["data"]))


class DeployedMethod:
    """A method of an object that Kubetorch has deployed, or a function that it has deployed."""

    def __init__(self, service: DeployedService, name: str | None, method: Method) -> None:
        self._service = service
        self._name = name
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method and return its result.

        See `loom_proxy.remote.objects.RemoteMethod` for ``async_`` and ``timeout``. With ``async_=True`` a thread
        makes the call once the result is awaited.

        Raises:
            Exception: the method's exception, if its class is Python's own or in the deployed class's module.
            RemoteException: the method's exception is of another class.
            ServiceUnreachable, WaitTimeout, UnpicklableError, WrongArguments, NoSuchMethod: the call failed.
        """
        async_, timeout = call_options(self._method, kwargs, self._service.timeout)
        self._method.check_returns("return a list instead")
        self._method.check(args, kwargs)
        if async_:
            return asyncio.to_thread(self._service.call, self._name, args, kwargs, timeout)
        return self._service.call(self._name, args, kwargs, timeout)

    def __repr__(self) -> str:
        return f"<remote {self._method.title} at {self._service.url}>"


class DeployedObject:
    """An object that ``kubetorch.cls`` has deployed. Its attributes are its public methods."""

    def __init__(self, service: DeployedService, methods: Mapping[str, Method] | None) -> None:
        self._service = service
        self._methods = methods  # the methods by name; None if this program does not have the class

    def __getattr__(self, name: str) -> DeployedMethod:
        if name.startswith("__") or "_methods" not in self.__dict__:
            raise AttributeError(name)
        called, methods = self._service.called, self._methods
        if name.startswith("_") or (methods is not None and name not in methods):
            no_method(called, name, methods, exists=False)
        method = Method(f"{called}.{name}") if methods is None else methods[name]
        return DeployedMethod(self._service, name, method)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(self._methods or ())})

    def __repr__(self) -> str:
        return f"<DeployedObject {self._service.called} at {self._service.url}>"


class DeployedFunction(DeployedMethod):
    """A function that ``kubetorch.fn`` has deployed."""

    def __init__(self, service: DeployedService, function: Method) -> None:
        super().__init__(service, None, function)

    def __repr__(self) -> str:
        return f"<DeployedFunction {self._service.called} at {self._service.url}>"


class _Removable:
    """A deployed object or function whose service this program removes, at the end of a ``with`` block, too."""

    def __init__(self, about: Any, service: DeployedService, end: Callable[[], object]) -> None:
        super().__init__(service, about)  # type: ignore[call-arg]
        self._end = end

    def teardown(self) -> None:
        """Remove the service with its pods."""
        self._end()

    def __enter__(self: R) -> R:
        return self

    def __exit__(self, *error: object) -> None:
        self.teardown()


class KubetorchObject(_Removable, DeployedObject):
    """An object that `loom.cls` has deployed in Kubetorch's own way, or has found by its name.

    A ``with`` block tears the object down at its end.
    """


class KubetorchFunction(_Removable, DeployedFunction):
    """A function that `loom.fn` has deployed in Kubetorch's own way, or has found by its name."""
