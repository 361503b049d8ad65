"""The form of large results that the driver can pass on without unpickling.

Monarch pickles a tensor through ``torch.save``, whole and with two copies. The driver would have to import torch to
unpickle it, only to pickle it again. So arrays and tensors at the top of a result, or in a list, tuple or dict
there, are taken apart (`loom.wire.arrays`). Any other receiver, such as another actor, unpickles them whole.
"""

from __future__ import annotations

from typing import Any

from loom.wire.arrays import take_apart_near_top

LARGE = 1 << 20  # bytes from which an array or a byte string in a result is taken apart; a tensor always is

_SMALL = frozenset({type(None), bool, int, float, str})


def send_large_results_apart() -> None:
    """Patch this process's actors to take large parts of their results apart before sending."""
    from monarch._src.actor.actor_mesh import Port

    original = Port._pending_result
    if hasattr(original, "__wrapped__"):
        return

    def pending_result(self: Any, result: Any) -> Any:
        return original(self, result if type(result) in _SMALL else take_apart_near_top(result, LARGE))

    pending_result.__wrapped__ = original  # type: ignore[attr-defined]
    Port._pending_result = pending_result
