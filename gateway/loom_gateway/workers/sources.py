"""The sources of workers: how their addresses are found.

A `WorkerSource` finds the workers of one host mesh: named ones (`StaticWorkers`), those behind a headless service's
name (`DnsWorkers`), or those in a file (`FileWorkers`). `WorkerHosts` combines several sources and gives each
worker a permanent number: ``hosts=0`` is the same pod tomorrow, or its replacement.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias
from urllib.parse import parse_qs, urlsplit

from loom.control.address import MONARCH_PORT
from loom.errors import InvalidAddress, WorkerUnreachable
from loom.process.listen import bracketed

WHOLE = "workers"  # the name of the mesh of sources without a name

_ADDRESS = re.compile(r"tcp://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})")
_ORDINAL = re.compile(r"[^.]*[a-z0-9]-(?P<ordinal>\d+)\..+")


@dataclass(frozen=True)
class WorkerList:
    """The workers of a gateway, as it publishes them in a file for its drivers and for the next gateway."""

    addresses: Sequence[str]
    """Each worker's ``tcp://HOST:PORT``, in the order of the dimension ``hosts``."""
    meshes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The numbers of the hosts of each named mesh."""
    sizes: Sequence[int] = ()
    """The number of workers from each of the gateway's sources, in the sources' order."""

    @classmethod
    def read(cls, path: str) -> WorkerList | None:
        """Return the list in a file; None if it does not exist or cannot be read."""
        try:
            found = json.loads(Path(path).read_text())
            meshes = {str(name): [int(number) for number in numbers] for name, numbers in found["meshes"].items()}
            sizes = [int(size) for size in found.get("sizes", ())]
            return cls([str(address) for address in found["addresses"]], meshes, sizes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


class WorkerAddress(NamedTuple):
    """Host and port of a Monarch worker."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{bracketed(self.host)}:{self.port}"


def parse_worker_address(text: str) -> WorkerAddress:
    """Parse ``tcp://HOST:PORT``. Raise `InvalidAddress` for another form, or a port outside 1 to 65535."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise InvalidAddress(
            f"{text!r} is not a worker address: write tcp://HOST:PORT, such as tcp://10.0.0.5:26600"
        )
    return WorkerAddress(match["host"].strip("[]"), int(match["port"]))


class WorkerPod(NamedTuple):
    """A pod behind a headless service."""

    address: str
    ordinal: int | None
    """The number at the end of a StatefulSet pod's name; None if it has none, or DNS does not tell."""


def resolve_pods(service: str) -> list[WorkerPod]:
    """Return the pods behind a headless service, ordered by ordinal if all have one, else by address.

    Raise `OSError` if the name is unknown, or the DNS does not answer.
    """
    found = socket.getaddrinfo(service, None, type=socket.SOCK_STREAM)
    addresses = {ipaddress.ip_address(info[4][0]) for info in found}
    pods = [WorkerPod(str(address), _ordinal(str(address), service)) for address in addresses]
    ordinals = [pod.ordinal for pod in pods]
    if None in ordinals or len(set(ordinals)) < len(pods):
        pods = [WorkerPod(pod.address, None) for pod in pods]
    return sorted(pods, key=_rank)


def _rank(pod: WorkerPod) -> tuple[int, int, int]:
    address = ipaddress.ip_address(pod.address)
    return (-1 if pod.ordinal is None else pod.ordinal, address.version, int(address))


def _ordinal(address: str, service: str) -> int | None:
    """Return the ordinal in an address's name within a service, or None."""
    try:
        name = socket.gethostbyaddr(address)[0]
    except OSError:
        return None
    # A Deployment's pod has its address as a name, 10-0-0-5.SERVICE.…, which also ends in a number.
    if name.partition(".")[0] == address.replace(".", "-").replace(":", "-"):
        return None
    match = _ORDINAL.fullmatch(name)
    within = name.partition(".")[2].split(".")[0] == service.split(".")[0]
    return int(match["ordinal"]) if match and within else None


class FoundWorker(NamedTuple):
    """A worker that a source has found."""

    address: str
    place: int | None = None
    """Its number among the source's workers, if the source knows it."""


@dataclass(frozen=True)
class StaticWorkers:
    """Workers at fixed addresses."""

    addresses: tuple[str, ...]
    where = advice = ""

    @property
    def count(self) -> int:
        return len(self.addresses)

    def find(self) -> Sequence[FoundWorker]:
        return [FoundWorker(address, place) for place, address in enumerate(self.addresses)]


@dataclass
class DnsWorkers:
    """Workers in the pods behind a headless service: ``count``, and further pods if a StatefulSet numbers them."""

    service: str
    port: int
    count: int
    _from_zero: bool = field(default=False, init=False, repr=False, compare=False)
    """Whether there was a pod with the ordinal 0: a StatefulSet may number its pods from elsewhere."""
    advice = "See why their pods are not ready, with `kubectl get pods` and `kubectl describe pod`"

    @property
    def where(self) -> str:
        return f" at {self.service}"

    def find(self) -> Sequence[FoundWorker]:
        try:
            pods = resolve_pods(self.service)
        except OSError as error:
            raise WorkerUnreachable(
                f"{self.service}, the headless service of {self.count} workers, cannot be resolved: "
                f"{getattr(error, 'strerror', None) or error}. See `kubectl get endpoints`, and whether its "
                "selector matches the workers' pods"
            ) from error
        self._from_zero |= pods[0].ordinal == 0
        # Further pods of a Deployment may be those that are about to take the places of others.
        numbered = all(pod.ordinal is not None and (self._from_zero or pod.ordinal < self.count) for pod in pods)
        return [
            FoundWorker(str(WorkerAddress(pod.address, self.port)), pod.ordinal if numbered else None)
            for pod in pods
        ]


@dataclass(frozen=True)
class FileWorkers:
    """Workers in a file: one address a line, with comments after ``#``. It is read again when it changes."""

    path: Path

    @property
    def where(self) -> str:
        return f" in the file {self.path}"

    @property
    def advice(self) -> str:
        return (
            f"Write the address of each into {self.path}, a line each, such as tcp://10.0.0.5:26600; it is read "
            "again when it changes"
        )

    @property
    def count(self) -> int:
        return max(len(self._addresses()), 1)

    def find(self) -> Sequence[FoundWorker]:
        # No places, so that a worker keeps its number when a line above its own is removed.
        return [FoundWorker(address) for address in self._addresses()]

    def _addresses(self) -> list[str]:
        try:
            lines = [line.partition("#")[0].strip() for line in self.path.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise WorkerUnreachable(f"the file of workers {self.path} cannot be read: {error}") from error
        try:
            addresses = [str(parse_worker_address(line)) for line in lines if line]
            _check_unique(addresses)
        except InvalidAddress as error:
            raise WorkerUnreachable(f"the file of workers {self.path}: {error}") from error
        return addresses


WorkerSource: TypeAlias = StaticWorkers | DnsWorkers | FileWorkers
"""A source of the workers of one mesh.

It has the ``count`` of expected workers, and ``where`` they are looked for, as part of a sentence; this is empty if
their addresses do not change. ``advice`` is for the user if some are missing. ``find`` returns the present workers,
in order. It may wait for the network, and raises `WorkerUnreachable` if the source cannot be read.
"""


def _check_unique(addresses: Sequence[str]) -> None:
    twice = {address for address in addresses if addresses.count(address) > 1}
    if twice:
        raise InvalidAddress(f"{', '.join(sorted(twice))} is given more than once: each worker is one host")


def parse_source(text: str) -> tuple[str, WorkerSource]:
    """Parse ``[MESH=]SOURCE``. Return the mesh's name and the source."""
    named = re.match(r"(?P<mesh>[^=:/?]*)=", text)
    mesh, source = (named["mesh"], text[named.end() :]) if named else (WHOLE, text)
    if not mesh.isidentifier() or mesh.startswith("_"):
        raise InvalidAddress(f"{mesh!r} cannot name a mesh: give a name such as workers, as in {WHOLE}={source}")
    if source.startswith("tcp://"):
        return mesh, StaticWorkers((str(parse_worker_address(source)),))
    if source.startswith("file:"):
        return mesh, FileWorkers(Path(source.removeprefix("file:").removeprefix("//")))
    if source.startswith("dns://"):
        return mesh, _dns_source(source)
    raise InvalidAddress(
        f"{source!r} names no place of processes: write tcp://HOST:PORT, dns://SERVICE:PORT?count=N or file:PATH"
    )


def _dns_source(source: str) -> DnsWorkers:
    form = "write dns://SERVICE:PORT?count=N, such as dns://workers.research.svc.cluster.local:26600?count=4"
    try:
        parts = urlsplit(source)
        service, port = parts.hostname, parts.port or MONARCH_PORT
        given = parse_qs(parts.query, strict_parsing=bool(parts.query))
        (count,) = given.pop("count")
        number = int(count)
    except (ValueError, KeyError) as error:
        raise InvalidAddress(f"{source!r} is no headless service of workers: {form}") from error
    if given or not service or parts.path not in ("", "/"):
        raise InvalidAddress(f"{source!r} is no headless service of workers: {form}")
    if number < 1:
        raise InvalidAddress(f"{source!r} has no workers: count is 1 at least")
    return DnsWorkers(service, port, number)


class WorkerHosts:
    """The workers of a gateway, each with its number.

    Args:
        sources: pairs of a mesh's name and a source of its workers. Several sources with one name form one mesh.
    """

    def __init__(self, sources: Sequence[tuple[str, WorkerSource]]) -> None:
        meshes = list(dict.fromkeys(mesh for mesh, _ in sources))
        self._sources = sorted(sources, key=lambda given: meshes.index(given[0]))
        self._places: list[list[str | None]] = [[] for _ in sources]  # addresses by number; None: not found yet
        self._numbered = False
        """True if sessions may use the numbers. From then on, they are permanent."""
        static = [source.addresses for _, source in sources if isinstance(source, StaticWorkers)]
        _check_unique([address for addresses in static for address in addresses])

    @classmethod
    def of(cls, addresses: Sequence[str]) -> WorkerHosts:
        hosts = cls([(WHOLE, StaticWorkers((address,))) for address in addresses])
        hosts.look()
        return hosts

    @property
    def changing(self) -> bool:
        return any(source.where for _, source in self._sources)

    @property
    def complete(self) -> bool:
        """True if every host has had a worker."""
        return all(places and None not in places for places in self._places)

    @property
    def addresses(self) -> list[str]:
        """Each host's address, in the order of the dimension ``hosts``; of a host that is gone, the last one."""
        return [address for places in self._places for address in places if address is not None]

    @property
    def meshes(self) -> dict[str, list[int]]:
        """The numbers of each mesh's hosts."""
        found: dict[str, list[int]] = {}
        number = 0
        for (mesh, _), places in zip(self._sources, self._places, strict=True):
            found.setdefault(mesh, []).extend(range(number, number + len(places)))
            number += len(places)
        return found

    def listed(self) -> WorkerList:
        return WorkerList(self.addresses, self.meshes, [len(places) for places in self._places])

    def take_over(self, listed: WorkerList) -> None:
        """Start with the numbers of an earlier gateway's list, if it has as many sources."""
        if len(listed.sizes) == len(self._sources) and sum(listed.sizes) == len(listed.addresses):
            addresses = iter(listed.addresses)
            self._places = [[next(addresses) for _ in range(size)] for size in listed.sizes]
            self._numbered = True

    def look(self) -> bool:
        """Look for workers again. Return whether anything has changed.

        Raise `WorkerUnreachable` if a source cannot be read. The results of the other sources are kept.
        """
        before = [list(places) for places in self._places]
        errors = []
        for (_, source), places in zip(self._sources, self._places, strict=True):
            try:
                found = source.find()
                # A session's hosts keep their numbers: hosts are never removed, and new ones only come after the
                # last.
                if not self._numbered or places is self._places[-1]:
                    places += [None] * (source.count - len(places))
                    while any(worker.place == len(places) for worker in found):
                        places.append(None)
            except WorkerUnreachable as error:
                errors.append(error)
                continue
            if not self._numbered:  # the order may still change
                places[:] = [None] * len(places)
            _put(places, found)
        self._numbered = self._numbered or self.complete
        if errors:
            raise errors[0]
        return self._places != before

    def check_complete(self) -> None:
        """Raise `WorkerUnreachable`, naming the missing hosts, if some hosts have no worker yet."""
        lines = []
        advice = []
        for (mesh, source), places in zip(self._sources, self._places, strict=True):
            there = [address for address in places if address is not None]
            if not places or len(there) < len(places):
                missing = [str(number) for number, address in enumerate(places) if address is None]
                lines.append(
                    f"{len(there)} of {max(len(places), 1)} workers of {mesh} have been found{source.where} "
                    f"({', '.join(there) or 'none'}); missing: number {', '.join(missing) or '0'}"
                )
                advice.append(source.advice)
        if lines:
            raise WorkerUnreachable(". ".join(["; ".join(lines), *dict.fromkeys(filter(None, advice))]))


def _put(places: list[str | None], found: Sequence[FoundWorker]) -> None:
    """Assign places to workers: the place that the source knows, else the present one, else the next free one."""
    here = {worker.address for worker in found}
    for worker in found:
        if worker.place is not None and worker.place < len(places):
            if worker.address in places and places[worker.place] != worker.address:
                places[places.index(worker.address)] = None
            places[worker.place] = worker.address
    new = [worker.address for worker in found if worker.place is None and worker.address not in places]
    free = [number for number, address in enumerate(places) if address is None]
    free += [number for number, address in enumerate(places) if address is not None and address not in here]
    for number, address in zip(free, new, strict=False):
        places[number] = address
