"""torchLoom's names of commands: Python, REST, the WebSocket and NATS take them wherever they take a command.

torchLoom names a group or a device where Loom has parameters for them, so a name stands for a kind and for the
meaning of its target.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loom.control.commands import CommandKind
from loom.errors import WrongArguments

_ALIASES = {
    "pause_training": (CommandKind.PAUSE, ""),
    "resume_training": (CommandKind.RESUME, ""),
    "stop_training": (CommandKind.STOP, ""),
    "reactivate_group": (CommandKind.REACTIVATE, "group"),
    "deactivate_device": (CommandKind.DEACTIVATE_DEVICE, "device"),
    "drain_device": (CommandKind.DEACTIVATE_DEVICE, "device"),
}
"""The kind of each name, and the parameter that its target is, if it is no replica."""

ALIASES = tuple(name for name in _ALIASES if name not in set(CommandKind))
"""The names that are not those of Loom."""


def translate(kind: str, target: Any, params: Mapping[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    """Return the kind, the target and the parameters that a command has in Loom's names.

    A name that is not one of torchLoom's comes back as it is.

    Raises:
        WrongArguments: the name needs a group or a device, and neither the target nor the parameters name one.
    """
    found, names = _ALIASES.get(kind, (kind, ""))
    plain = found.value if isinstance(found, CommandKind) else kind
    if not names or not {"device", "group"}.isdisjoint(params):
        return plain, target, dict(params)
    if isinstance(target, str) and target not in ("", "*"):
        return plain, None, {**params, names: target}
    if kind == plain:  # a name of Loom's as well, whose own checks say what it needs
        return plain, target, dict(params)
    raise WrongArguments(f"{kind} names a {names} as its target, not {target!r:.80}")
