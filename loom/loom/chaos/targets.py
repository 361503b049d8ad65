"""Whom a fault strikes, among the replicas that there are."""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from loom.errors import NotInjectable, UnknownReplica

if TYPE_CHECKING:
    from loom.weaver.views import ReplicaInfo


ENDED = ("failed", "finished")
"""States of replicas that do not live."""


@dataclass(frozen=True)
class Target:
    """Whom a fault strikes: living replicas for which all holds that is given."""

    # Read by pydantic in a plan. The laptop, which may have none, targets single faults, too.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    replica: str | None = None
    """An id, a short name, or a glob."""
    mesh: str | None = None
    """The name of the proc mesh, which is the group of its replicas; or a glob."""
    rank: int | None = None
    """In the mesh."""
    host: str | None = None
    """The name of the host, or a glob."""
    session: str | None = None
    random: int | None = None
    """How many of them, chosen by the plan's seed; None: all."""

    def __str__(self) -> str:
        names = ("replica", "mesh", "rank", "host", "session")
        said = [f"{name} {value}" for name in names if (value := getattr(self, name)) is not None]
        chosen = [] if self.random is None else [f"{self.random} at random"]
        return ", ".join(chosen + said) or "all"


def matching(target: Target, replicas: Iterable[ReplicaInfo]) -> list[ReplicaInfo]:
    """The replicas that a target names, in whatever state, sorted by their ids; ``random`` is left to `chosen`."""
    return sorted((one for one in replicas if _is_meant(target, one)), key=lambda one: one.id)


def living(replicas: Iterable[ReplicaInfo]) -> list[ReplicaInfo]:
    """Those of replicas that live."""
    return [one for one in replicas if one.state not in ENDED]


def check_target(target: Target, replicas: Mapping[str, ReplicaInfo]) -> None:
    """See that a target names somebody who lives, and only who is marked as injectable.

    Raises:
        UnknownReplica: it names nobody who lives.
        NotInjectable: somebody whom it names is not marked.
    """
    found = living(matching(target, replicas.values()))
    if not found:
        few = ", ".join(sorted(one.id for one in living(replicas.values()))[:5]) or "none"
        raise UnknownReplica(f"the target ({target}) matches no replica that lives; there are {few}")
    unmarked = [one.id for one in found if not one.injectable]
    if unmarked:
        raise NotInjectable(f"the target ({target}) matches replicas that are not marked as injectable: "
                            f"{', '.join(unmarked[:5])}")  # fmt: skip


def chosen(target: Target, found: list[ReplicaInfo], luck: random.Random) -> list[ReplicaInfo]:
    """Those of the replicas found that chance gives, where the target leaves it to that."""
    if target.random is None:
        return found
    return sorted(luck.sample(found, min(target.random, len(found))), key=lambda one: one.id)


def _is_meant(target: Target, replica: ReplicaInfo) -> bool:
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
