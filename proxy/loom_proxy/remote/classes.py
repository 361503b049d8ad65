"""`loom.cls` and `loom.fn`: any class or function in the cluster, with Kubetorch's names.

Their results have a method ``to``, which starts processes of a job with the class or function, and a method ``at``,
which reaches one that Kubetorch has deployed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from loom.errors import Invalid, NameTaken, WrongArguments
from loom.hosted import AsyncHosted, Hosted
from loom.methods import Method, constructor_of, function_of, methods_of
from loom_proxy.job import Job
from loom_proxy.mesh.actors import ActorMeshProxy
from loom_proxy.mesh.procs import ProcMeshProxy
from loom_proxy.remote.kubetorch import DeployedFunction, DeployedObject, Service
from loom_proxy.remote.objects import OWN_NAMES, RemoteFunction, RemoteObject, make

CONNECTION_MODES = ("websocket", "http")


def cls(class_obj: Any, name: str | None = None) -> Any:
    """Prepare a class whose objects live in the cluster; the counterpart of ``kubetorch.cls``.

    ::

        with loom.cls(Trainer).to(job, init_args=(0.1,)) as trainer:
            print(trainer.step(batch))

    Args:
        class_obj: the class, which is no `Actor`; a deployed result of ``kubetorch.cls``; or, for `RemoteClass.at`,
            the class's name.
        name: name of the object's meshes; default the class's name, and a number if that is taken.

    Returns:
        `RemoteClass`; for a deployed result of ``kubetorch.cls``, a `DeployedObject`.

    Raises:
        WrongArguments: ``class_obj`` is none of these.
    """
    if _is_module(class_obj, "cls"):
        return DeployedObject(_service_of(class_obj), None)
    if not isinstance(class_obj, (type, str)):
        raise WrongArguments(f"loom.cls takes a class, not {class_obj!r:.80}; loom.fn takes a function")
    if isinstance(class_obj, type) and _is_actor(class_obj):
        raise WrongArguments(f"{class_obj.__name__} is an actor: spawn it with job.hosts.spawn_procs(…).spawn(…)")
    return RemoteClass(class_obj, name)


def fn(function_obj: Any, name: str | None = None) -> Any:
    """Prepare a function that runs in the cluster when it is called here; the counterpart of ``kubetorch.fn``.

    Args:
        function_obj: the function; a deployed result of ``kubetorch.fn``; or, for `RemoteFunctionMaker.at`, the
            function's name.
        name: name of the function's meshes; default the function's name, and a number if that is taken.

    Returns:
        `RemoteFunctionMaker`; for a deployed result of ``kubetorch.fn``, a `DeployedFunction`.

    Raises:
        WrongArguments: ``function_obj`` is none of these.
    """
    if _is_module(function_obj, "fn"):
        return DeployedFunction(_service_of(function_obj), Method(function_obj.callable_name))
    if isinstance(function_obj, type) or not (callable(function_obj) or isinstance(function_obj, str)):
        raise WrongArguments(f"loom.fn takes a function, not {function_obj!r:.80}; loom.cls takes a class")
    return RemoteFunctionMaker(function_obj, name)


class _Maker:
    """A class or a function that is not in the cluster yet."""

    def __init__(self, target: Any, name: str | None) -> None:
        self._target = target  # the class or function, or its name
        self._name = name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {_name_of(self._target)}>"

    def _service(self, url: str, serialization: str, timeout: float | None) -> Service:
        return Service(url, _name_of(self._target), serialization, timeout, self._target)


class RemoteClass(_Maker):
    """A class without objects in the cluster yet; see `cls`."""

    def to(
        self,
        job: Job,
        *,
        name: str | None = None,
        hosts: int | slice | None = None,
        per_host: Mapping[str, int] | None = None,
        init_args: Sequence[Any] | Mapping[str, Any] = (),
        init_kwargs: Mapping[str, Any] | None = None,
        connection_mode: str | None = None,
        timeout: float | None = None,
    ) -> RemoteObject:
        """Start processes, make an object of the class in each, and wait until the objects are made.

        The class travels as actor classes do: by value, unless it is installed in the cluster or synced.

        Args:
            job: the session.
            name: name of the object's meshes; default the name given to `cls`.
            hosts: index of the host, or a slice of hosts; None: host 0. ``slice(None)`` is all.
            per_host: dimensions of the processes on each host, see `HostMeshProxy.spawn_procs`; None: one process.
            init_args: arguments of the constructor: a sequence of positional ones, or a dict of named ones as in
                Kubetorch.
            init_kwargs: named arguments of the constructor.
            connection_mode: ``"websocket"`` or ``"http"``, to require that the job is connected so, since calls use
                the job's one connection; None takes either.
            timeout: seconds that the constructor, and each call, may take; None: any number.

        Raises:
            Exception: the constructor's exception, raised as `RemoteMethod` raises those of methods. The processes
                are ended.
            WrongArguments: ``job`` is no job, the class is only a name, or its constructor does not take the
                arguments.
            WrongConnectionMode: the job is connected over the other transport.
            ObjectNameTaken: the session has a mesh of that name.
            EndpointNameTaken: a method has a name that every remote object uses itself.
            SessionClosed: the job is closed.
        """
        target = self._target
        if isinstance(target, str):
            raise WrongArguments(f"loom.cls({target!r}) is a name: give the class, or reach it with .at(url)")
        args, kwargs = _init(init_args, init_kwargs)
        methods = methods_of(target)
        if taken := sorted(OWN_NAMES & methods.keys()):
            raise NameTaken(
                f"{target.__name__}.{taken[0]}: every remote object has that name itself",
                code="endpoint_name_taken",
            )
        signature = constructor_of(target)
        if signature is not None:
            signature.check(args, kwargs)
        place = _Place(job, hosts, per_host, connection_mode)
        name = place.name(name or self._name, target.__name__)
        procs, mesh = place.host(name, target, args, kwargs, methods.values())
        return make(RemoteObject(name, target, procs, mesh, methods, timeout))

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
        methods = None if isinstance(self._target, str) else methods_of(self._target)
        return DeployedObject(self._service(url, serialization, timeout), methods)


class RemoteFunctionMaker(_Maker):
    """A function without processes in the cluster yet; see `fn`."""

    def to(
        self,
        job: Job,
        *,
        name: str | None = None,
        hosts: int | slice | None = None,
        per_host: Mapping[str, int] | None = None,
        connection_mode: str | None = None,
        timeout: float | None = None,
    ) -> RemoteFunction:
        """Start processes that call the function. Arguments and errors are those of `RemoteClass.to`."""
        target = self._target
        if isinstance(target, str):
            raise WrongArguments(f"loom.fn({target!r}) is a name: give the function, or reach it with .at(url)")
        function = function_of(target)
        place = _Place(job, hosts, per_host, connection_mode)
        name = place.name(name or self._name, function.title)
        procs, mesh = place.host(name, target, (), {}, [function])
        return make(RemoteFunction(name, procs, mesh, function, timeout))

    def at(self, url: str, serialization: str = "json", timeout: float | None = None) -> DeployedFunction:
        """Return the function that Kubetorch has deployed. Arguments and errors are those of `RemoteClass.at`."""
        target = self._target
        function = Method(target) if isinstance(target, str) else function_of(target)
        return DeployedFunction(self._service(url, serialization, timeout), function)


class _Place:
    """The place of a remote object: hosts of a job, and the processes to start on each."""

    def __init__(
        self, job: Any, hosts: int | slice | None, per_host: Mapping[str, int] | None, connection_mode: str | None
    ) -> None:
        job = getattr(job, "job", job)  # a KubernetesJob holds a Job
        if not isinstance(job, Job):
            raise WrongArguments(f".to() takes a job, as loom.connect and loom.local give it, not {job!r:.80}")
        job._calls.check_open()
        _check_mode(job, connection_mode)
        self._job = job
        self._hosts = job.hosts.slice(hosts=0 if hosts is None else hosts)
        self._per_host = per_host

    def name(self, wanted: str | None, default: str) -> str:
        taken = {name for name, mesh in self._job.meshes.items() if not mesh._whole.stopped}
        if wanted is None:
            numbered = (f"{default}_{number}" for number in itertools.count(2))
            return next(name for name in itertools.chain([default], numbered) if name not in taken)
        if wanted in taken:
            raise NameTaken(
                f"session {self._job.session!r} has a mesh {wanted!r} already: tear it down, or give another name",
                code="object_name_taken",
            )
        return wanted

    def host(
        self, name: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], methods: Any
    ) -> tuple[ProcMeshProxy, ActorMeshProxy]:
        actor = AsyncHosted if any(method.is_async for method in methods) else Hosted
        procs = self._hosts.spawn_procs(self._per_host, name=name)
        try:
            return procs, procs.spawn(name, actor, target, args, kwargs)
        except BaseException:  # the class or an argument cannot be pickled
            procs.stop("nothing was spawned")
            raise


def _check_mode(job: Job, mode: str | None) -> None:
    if mode is None or mode == job.transport:
        return
    if mode not in CONNECTION_MODES:
        why = ": give 'websocket' or 'http', or leave it out"
    else:
        why = (
            f", but this job is connected over {job.transport!r}, and its calls take that: connect it with "
            f"loom.connect(…, transport={mode!r}), or leave connection_mode out"
        )
    raise Invalid(f"connection_mode is {mode!r}{why}", code="wrong_connection_mode")


def _init(
    args: Sequence[Any] | Mapping[str, Any], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    named = dict(kwargs or {})
    if isinstance(args, Mapping):
        return (), {**args, **named}
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise WrongArguments(f"init_args is {args!r:.80}: give a tuple or a list, or a dict of named arguments")
    return tuple(args), named


def _is_module(target: Any, kind: str) -> bool:
    """Return whether an object is a result of Kubetorch's function of that name."""
    return getattr(type(target), "MODULE_TYPE", None) == kind and hasattr(type(target), "base_endpoint")


def _service_of(deployed: Any) -> Service:
    """Return the service of a deployed result of ``kubetorch.cls`` or ``kubetorch.fn``."""
    return Service(lambda: str(deployed.base_endpoint), deployed.callable_name, deployed.serialization)


def _is_actor(target: type) -> bool:
    from loom.actor import Actor  # imported late: if torchmonarch is installed, this takes a second

    return issubclass(target, Actor)


def _name_of(target: Any) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", "function"))
