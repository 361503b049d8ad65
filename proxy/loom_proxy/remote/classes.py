"""`loom.cls` and `loom.fn`: any class or function in the cluster, with Kubetorch's names.

Their results have a method ``to``, which starts processes of a job with the class or function, or deploys pods for
it, and a method ``at``, which reaches one that Kubetorch has deployed. A deployed object is also found by its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from loom.errors import NameTaken, WrongArguments
from loom.remote_objects import Method, constructor_of, function_of, methods_of
from loom_proxy.kubernetes import kubetorch_names
from loom_proxy.remote.deployments import Deployment, find, service_of
from loom_proxy.remote.kubetorch import (
    DeployedFunction,
    DeployedObject,
    DeployedService,
    KubetorchFunction,
    KubetorchObject,
)
from loom_proxy.remote.objects import OWN_NAMES, RemoteFunction, RemoteObject, make
from loom_proxy.remote.resources import RemoteResources, check_mode, open_job


class _Named:
    """A name. Its deployment is looked for at the first use."""

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
        """Remove the deployment of the name, with its pods."""
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


def cls(
    class_obj: Any = None,
    name: str | None = None,
    *,
    reload_prefixes: str | Sequence[str] = (),
    namespace: str | None = None,
) -> Any:
    """Prepare a class whose objects live in the cluster, or find a deployed object; as ``kubetorch.cls``.

    ::

        with loom.cls(Trainer).to(job, init_args=(0.1,)) as trainer:
            print(trainer.step(batch))

    Args:
        class_obj: the class, which is no `Actor`; a deployed result of ``kubetorch.cls``; or the name of a deployed
            object, or of a class for `RemoteClass.at`.
        name: name of the object's meshes and its service; default the class's name, for meshes with a number if
            that is taken. Without ``class_obj`` the name of a deployed object.
        reload_prefixes: prefixes of the service to find, in place of the user's and the branch's names.
        namespace: namespace of the service to find; default Kubetorch's.

    Returns:
        `RemoteClass`; for a name, a `NamedClass`; for a deployed result of ``kubetorch.cls``, a `DeployedObject`.

    Raises:
        WrongArguments: ``class_obj`` is none of these.
    """
    class_obj = name if class_obj is None else class_obj
    if kubetorch_names.is_deployed(class_obj, "cls"):
        return DeployedObject(service_of(class_obj), None)
    if isinstance(class_obj, str):
        return NamedClass(class_obj, namespace, reload_prefixes)
    if not isinstance(class_obj, type):
        raise WrongArguments(f"loom.cls takes a class, not {class_obj!r:.80}; loom.fn takes a function")
    if _is_actor(class_obj):
        raise WrongArguments(f"{class_obj.__name__} is an actor: spawn it with job.hosts.spawn_procs(…).spawn(…)")
    return RemoteClass(class_obj, name)


def fn(
    function_obj: Any = None,
    name: str | None = None,
    *,
    reload_prefixes: str | Sequence[str] = (),
    namespace: str | None = None,
) -> Any:
    """Prepare a function that runs in the cluster when it is called here, or find one; as ``kubetorch.fn``.

    Args:
        function_obj: the function; a deployed result of ``kubetorch.fn``; or the name of a deployed function, or of
            one for `RemoteFunctionMaker.at`.
        name: name of the function's meshes and its service; default the function's name, for meshes with a number
            if that is taken. Without ``function_obj`` the name of a deployed function.
        reload_prefixes: as for `cls`.
        namespace: as for `cls`.

    Returns:
        `RemoteFunctionMaker`; for a name, a `NamedFunction`; for a deployed result of ``kubetorch.fn``, a
        `DeployedFunction`.

    Raises:
        WrongArguments: ``function_obj`` is none of these.
    """
    function_obj = name if function_obj is None else function_obj
    if kubetorch_names.is_deployed(function_obj, "fn"):
        return DeployedFunction(service_of(function_obj), Method(function_obj.callable_name))
    if isinstance(function_obj, str):
        return NamedFunction(function_obj, namespace, reload_prefixes)
    if isinstance(function_obj, type) or not callable(function_obj):
        raise WrongArguments(f"loom.fn takes a function, not {function_obj!r:.80}; loom.cls takes a class")
    return RemoteFunctionMaker(function_obj, name)


class _Maker:
    """A class or a function that is not in the cluster yet."""

    def __init__(self, target: Any, name: str | None) -> None:
        self._target = target
        self._name = name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {_name_of(self._target)}>"

    async def to_async(self, job: Any, **options: Any) -> Any:
        """Do what `to` does, with the same arguments, in a thread."""
        return await asyncio.to_thread(self.to, job, **options)  # type: ignore[attr-defined]

    def _service(self, url: str, serialization: str, timeout: float | None) -> DeployedService:
        return DeployedService(url, _name_of(self._target), serialization, timeout, self._target)

    def _deployment(
        self,
        compute: Any,
        name: str | None,
        get_if_exists: bool,
        reload_prefixes: str | Sequence[str],
        stream_logs: bool | None,
    ) -> Deployment:
        name = name or self._name or _name_of(self._target)
        return Deployment(self._target, compute, name, get_if_exists, _listed(reload_prefixes), stream_logs)


class RemoteClass(_Maker):
    """A class without objects in the cluster yet; see `cls`."""

    def to(
        self,
        job: Any,
        *,
        name: str | None = None,
        hosts: int | slice | None = None,
        per_host: Mapping[str, int] | None = None,
        init_args: Sequence[Any] | Mapping[str, Any] | None = (),
        init_kwargs: Mapping[str, Any] | None = None,
        connection_mode: str | None = None,
        timeout: float | None = None,
        get_if_exists: bool = False,
        reload_prefixes: str | Sequence[str] = (),
        stream_logs: bool | None = None,
    ) -> Any:
        """Start processes, make an object of the class in each, and wait until the objects are made.

        The class travels as actor classes do: by value, unless it is installed in the cluster or synced. With a
        ``kubetorch.Compute`` Kubetorch deploys pods for it first, in place of an earlier deployment of the name.

        Args:
            job: the session; or a ``kubetorch.Compute``, whose pods the object gets.
            name: name of the object's meshes and its service; default the name given to `cls`.
            hosts: index of the host, or a slice of hosts; None: host 0. ``slice(None)`` is all.
            per_host: dimensions of the processes on each host, see `HostMeshProxy.spawn_procs`; None: one process.
            init_args: arguments of the constructor: a sequence of positional ones, or a dict of named ones as in
                Kubetorch.
            init_kwargs: named arguments of the constructor.
            connection_mode: of a job, ``"websocket"`` or ``"http"`` requires that the job is connected so, since
                calls use the job's one connection; None takes either. For a compute, ``"websocket"`` (the default)
                puts the object into a session of its own, and calls take that session's connection; ``"http"`` is
                Kubetorch's own way: its server imports the class, and each call is a request.
            timeout: seconds that the constructor, and each call, may take; None: any number.
            get_if_exists: take an object that is deployed under the name, if there is one. For a compute only, as
                are the next two.
            reload_prefixes: prefixes of such an object's service, in place of the user's and the branch's names.
            stream_logs: whether the pods' output is printed here; None: as Kubetorch is configured.

        Returns:
            `RemoteObject`; with ``"http"`` and a compute, `KubetorchObject`.

        Raises:
            Exception: the constructor's exception, raised as `RemoteMethod` raises those of methods. The processes
                are ended, and the pods that were deployed for it are removed.
            WrongArguments: ``job`` is neither, or the constructor does not take the arguments.
            WrongConnectionMode: the job is connected over the other transport.
            ObjectNameTaken: the session has a mesh of that name.
            EndpointNameTaken: a method has a name that every remote object uses itself.
            SessionClosed: the job is closed.
            DeploymentFailed: the pods cannot be deployed.
            MissingDependency: Kubetorch is not installed.
        """
        target = self._target
        args, kwargs = _init(init_args or (), init_kwargs)
        methods = methods_of(target)
        if taken := sorted(OWN_NAMES & methods.keys()):
            raise NameTaken(
                f"{target.__name__}.{taken[0]}: every remote object has that name itself",
                code="endpoint_name_taken",
            )
        signature = constructor_of(target)
        if signature is not None:
            signature.check(args, kwargs)
        if kubetorch_names.is_compute(job):
            deployment = self._deployment(job, name, get_if_exists, reload_prefixes, stream_logs)
            if _is_http(connection_mode):
                _check_http(args, hosts, per_host)
                return KubetorchObject(methods, *deployment.by_kubetorch("cls", kwargs or None, timeout))
            if (joined := deployment.existing()) is not None:
                return RemoteObject(target, methods, timeout, *joined)
            deployed = deployment.in_session(hosts, per_host, args, kwargs, methods.values())
            return make(RemoteObject(target, methods, timeout, *deployed))
        _check_job_only(get_if_exists, reload_prefixes, stream_logs)
        resources = RemoteResources(open_job(job, connection_mode), hosts, per_host)
        name = resources.name(name or self._name, target.__name__)
        mesh, end = resources.host(name, target, args, kwargs, methods.values())
        return make(RemoteObject(target, methods, timeout, name, mesh, end))

    def at(self, url: str, serialization: str = "json", timeout: float | None = None) -> DeployedObject:
        """Return the object that Kubetorch has deployed; calls go to its HTTP endpoint.

        Args:
            url: URL of its service, such as ``http://localhost:32300`` or ``https://HOST/NAMESPACE/SERVICE:32300``.
            serialization: ``"json"``, or ``"pickle"`` if the service allows it.
            timeout: seconds that each call may take; None: any number.

        Raises:
            InvalidAddress: ``url`` is no URL of a service.
            WrongArguments: the serialization is neither.
        """
        return DeployedObject(self._service(url, serialization, timeout), methods_of(self._target))


class RemoteFunctionMaker(_Maker):
    """A function without processes in the cluster yet; see `fn`."""

    def to(
        self,
        job: Any,
        *,
        name: str | None = None,
        hosts: int | slice | None = None,
        per_host: Mapping[str, int] | None = None,
        connection_mode: str | None = None,
        timeout: float | None = None,
        get_if_exists: bool = False,
        reload_prefixes: str | Sequence[str] = (),
        stream_logs: bool | None = None,
    ) -> Any:
        """Start processes that call the function. Arguments and errors are those of `RemoteClass.to`."""
        target = self._target
        function = function_of(target)
        if kubetorch_names.is_compute(job):
            deployment = self._deployment(job, name, get_if_exists, reload_prefixes, stream_logs)
            if _is_http(connection_mode):
                _check_http((), hosts, per_host)
                return KubetorchFunction(function, *deployment.by_kubetorch("fn", None, timeout))
            if (joined := deployment.existing()) is not None:
                return RemoteFunction(function, timeout, *joined)
            return make(
                RemoteFunction(function, timeout, *deployment.in_session(hosts, per_host, (), {}, [function]))
            )
        _check_job_only(get_if_exists, reload_prefixes, stream_logs)
        resources = RemoteResources(open_job(job, connection_mode), hosts, per_host)
        name = resources.name(name or self._name, function.title)
        mesh, end = resources.host(name, target, (), {}, [function])
        return make(RemoteFunction(function, timeout, name, mesh, end))

    def at(self, url: str, serialization: str = "json", timeout: float | None = None) -> DeployedFunction:
        """Return the function that Kubetorch has deployed. Arguments and errors are those of `RemoteClass.at`."""
        return DeployedFunction(self._service(url, serialization, timeout), function_of(self._target))


def _check_job_only(get_if_exists: bool, reload_prefixes: Any, stream_logs: bool | None) -> None:
    if get_if_exists or reload_prefixes or stream_logs is not None:
        raise WrongArguments(
            "get_if_exists, reload_prefixes and stream_logs are for a kubetorch.Compute: a job has job.meshes and "
            "job.print_logs"
        )


def _is_http(mode: str | None) -> bool:
    check_mode(mode)
    return mode == "http"


def _check_http(args: Sequence[Any], hosts: Any, per_host: Any) -> None:
    if args or hosts is not None or per_host is not None:
        raise WrongArguments(
            "with connection_mode='http' Kubetorch makes the object: init_args is a dict of named arguments, and "
            "hosts and per_host are left out; or leave connection_mode out"
        )


def _init(
    args: Sequence[Any] | Mapping[str, Any], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    named = dict(kwargs or {})
    if isinstance(args, Mapping):
        return (), {**args, **named}
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise WrongArguments(f"init_args is {args!r:.80}: give a tuple or a list, or a dict of named arguments")
    return tuple(args), named


def _listed(prefixes: str | Sequence[str]) -> Sequence[str]:
    return [prefixes] if isinstance(prefixes, str) else list(prefixes)


def _is_actor(target: type) -> bool:
    from loom.actor import Actor  # imported late: if torchmonarch is installed, this takes a second

    return issubclass(target, Actor)


def _name_of(target: Any) -> str:
    return str(getattr(target, "__name__", "function"))
