"""The notices of failures: each replica of a job hears which of the others have failed."""

from __future__ import annotations

from loom.control.reports import MAX_REASON, PeerFailure, PeerFailures
from loom.weaver.commit_output import Outbox
from loom.weaver.registry import Registry
from loom.weaver.replicas import Replica
from loom.weaver.states import LIVING, ReplicaState


class PeerNotices:
    """The part of the weaver that tells the replicas of a job about failed ones."""

    def __init__(self, known: Registry, outbox: Outbox) -> None:
        self._known = known
        self._outbox = outbox
        self._failed: dict[str, list[PeerFailure]] = {}
        """The failures since the last commit, by job."""

    def failed(self, replica: Replica) -> None:
        """Note that a replica has failed. The others hear of it with the next commit, in one frame for all."""
        self._failed.setdefault(replica.job, []).append(_failure(replica))

    def tell(self) -> None:
        """Tell the connected replicas of each job the failures since the last call."""
        if not self._failed:
            return
        frames = {job: PeerFailures(tuple(failures)) for job, failures in self._failed.items()}
        self._failed.clear()
        for replica in self._known.replicas.values():
            if replica.link is not None and replica.state in LIVING and replica.job in frames:
                self._outbox.send(replica, frames[replica.job])

    def tell_again(self, replica: Replica) -> None:
        """Tell a replica that has reconnected all failures in its time: it may have missed some."""
        failures = tuple(
            _failure(peer)
            for peer in self._known.replicas.values()
            if peer.state is ReplicaState.FAILED and peer.job == replica.job and peer.changed >= replica.registered
        )
        if failures:
            self._outbox.send(replica, PeerFailures(failures))


def _failure(replica: Replica) -> PeerFailure:
    return PeerFailure(replica.id, replica.instance, (replica.died_of or "")[:MAX_REASON])
