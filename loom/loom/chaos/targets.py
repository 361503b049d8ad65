"""The choice of a fault's targets among the replicas."""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from loom.errors import Denied, NotFound

if TYPE_CHECKING:
    from loom.weaver.views import ReplicaInfo


ENDED = ("failed", "finished")  # the states of replicas that do not live


@dataclass(frozen=True)
class Target:
    """The target of a fault: the living replicas that match every given field."""

    # For pydantic, which reads plans. This is no import of pydantic, because laptops without it use targets too.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    replica: str | None = None
    """An id, a short name, or a glob."""
    mesh: str | None = None
    """The name of the proc mesh, which is the group of its replicas; or a glob."""
    rank: int | None = None
    host: str | None = None
    """The name of the host, or a glob."""
    session: str | None = None
    random: int | None = None
    """The number of replicas to choose, by the plan's seed; None: all."""

    def __str__(self) -> str:
        names = ("replica", "mesh", "rank", "host", "session")
        fields = [f"{name} {value}" for name in names if (value := getattr(self, name)) is not None]
        chosen = [] if self.random is None else [f"{self.random} at random"]
        return ", ".join(chosen + fields) or "all"


def matching(target: Target, replicas: Iterable[ReplicaInfo]) -> list[ReplicaInfo]:
    """Return the replicas that a target names, in any state, sorted by id. `chosen` applies ``random``."""
    return sorted((one for one in replicas if _matches(target, one)), key=lambda one: one.id)


def living(replicas: Iterable[ReplicaInfo]) -> list[ReplicaInfo]:
    """Return the replicas that live."""
    return [one for one in replicas if one.state not in ENDED]


def check_target(target: Target, replicas: Mapping[str, ReplicaInfo]) -> list[ReplicaInfo]:
    """Return the living replicas that a target names, or raise `NotFound`, or `Denied` if one is not injectable."""
    found = living(matching(target, replicas.values()))
    if not found:
        few = ", ".join(sorted(one.id for one in living(replicas.values()))[:5]) or "none"
        text = f"the target ({target}) matches no replica that lives; there are {few}"
        raise NotFound(text, code="unknown_replica")
    unmarked = [one.id for one in found if not one.injectable]
    if unmarked:
        few = ", ".join(unmarked[:5])
        text = f"the target ({target}) matches replicas that are not marked as injectable: {few}"
        raise Denied(text, code="not_injectable")
    return found


def chosen(target: Target, found: list[ReplicaInfo], luck: random.Random) -> list[ReplicaInfo]:
    """Return a random choice of the replicas if the target asks for one, else all."""
    if target.random is None:
        return found
    return sorted(luck.sample(found, min(target.random, len(found))), key=lambda one: one.id)


def _matches(target: Target, replica: ReplicaInfo) -> bool:
    short = replica.id.partition("@")[0]
    names = (
        (target.replica, (replica.id, short)),
        (target.mesh, (replica.group,)),
        (target.host, (replica.host,)),
        (target.session, (replica.session or "",)),
    )
    return all(
        wanted is None or any(fnmatch.fnmatchcase(name, wanted) for name in known) for wanted, known in names
    ) and target.rank in (None, replica.rank)
