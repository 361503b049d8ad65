"""Which pod has the gateway: no vote, only a rule that all pods apply to what they see.

A pod that has it keeps it, since its sessions live there. Where none has, the first does: the one with the lowest
ordinal, else the lowest address. Pods that do not see the same may for a moment choose differently; as soon as they
see each other, the one that comes first goes on and the other ends its gateway.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def choose(
    ranked: Sequence[str],
    expected: int,
    answering: Collection[str],
    holders: Collection[str],
    *,
    patient: bool,
) -> str | None:
    """Return the address of the pod that gets the gateway; None if that cannot be said yet.

    Args:
        ranked: addresses of the pods that are known, the first first.
        expected: how many there should be.
        answering: those whose keepers answer.
        holders: those that say that they have it.
        patient: whether to wait for pods that are missing or do not answer, one of which might come first.
    """
    held = [address for address in ranked if address in holders]
    if held:
        return held[0]
    if patient and (len(ranked) < expected or ranked[0] not in answering):
        return None
    return next((address for address in ranked if address in answering), None)
