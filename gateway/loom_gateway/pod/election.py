"""The choice of the gateway's pod: a rule that every pod applies to what it sees, without a vote.

A pod that has the gateway keeps it, because its sessions live there. If no pod has it, the first gets it: the one
with the lowest ordinal, or without ordinals the lowest address. Pods with different views may briefly choose
differently. As soon as they see each other, the first pod keeps its gateway and the other ends its own.
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
    """Return the address of the pod that gets the gateway; None if it is too early to say.

    Args:
        ranked: addresses of the known pods, in order of preference.
        expected: the number of pods that there should be.
        answering: addresses of the pods whose keepers answer.
        holders: addresses of the pods that report to have the gateway.
        patient: whether to wait for pods that are missing or silent, because one of them might come first.
    """
    held = [address for address in ranked if address in holders]
    if held:
        return held[0]
    if patient and (len(ranked) < expected or ranked[0] not in answering):
        return None
    return next((address for address in ranked if address in answering), None)
