"""Makes the processes of a session send large results in a form that the driver can pass on.

Monarch pickles a tensor through ``torch.save``, whole and twice copied, and the driver would have to import torch
to unpickle it only to pickle it again. An array or a tensor at the top of a result, or in a list, tuple or dict
there, is taken apart instead (`loom.wire.arrays`); whoever else unpickles it, such as another actor, has it whole.
"""

from __future__ import annotations

from typing import Any

from loom.wire.arrays import take_apart_near_top

LARGE = 1 << 20
"""Bytes of an array or a byte string in a result that is taken apart; a tensor always is."""

_SMALL = frozenset({type(None), bool, int, float, str})


def send_large_results_apart() -> None:
    """Have every result that an actor of this process sends be looked at first."""
    from monarch._src.actor.actor_mesh import Port

    original = Port._pending_result
    if hasattr(original, "__wrapped__"):
        return

    def pending_result(self: Any, result: Any) -> Any:
        return original(self, result if type(result) in _SMALL else take_apart_near_top(result, LARGE))

    pending_result.__wrapped__ = original  # type: ignore[attr-defined]
    Port._pending_result = pending_result
