"""The start of a proc mesh's process, described without Monarch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass
class BootstrapCommand:
    """The command that starts a process, like Monarch's class of this name, with the cluster's defaults.

    Args:
        program: the program to execute; None is the Python that the driver runs with.
        arg0: its name for itself; None is the program's.
        args: its arguments; None are those that make it a process of Monarch.
        env: environment variables; None as a value removes an inherited one.
        inherit_env: whether to start from the host's environment, not from an empty one.
    """

    program: str | None = None
    arg0: str | None = None
    args: list[str] | None = None
    env: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    inherit_env: bool = True

    def with_env(self, env: Mapping[str, str | None]) -> BootstrapCommand:
        """Return a copy with more environment variables, which take precedence."""
        return dataclasses.replace(self, env={**self.env, **env})

    def __call__(self, point: object) -> Any:
        """Return Monarch's own command. In the cluster, Monarch calls this object as a ``bootstrap_command``."""
        from loom.actor import monarch_bootstrap_command

        return monarch_bootstrap_command(self)


def default_bootstrap_cmd() -> BootstrapCommand:
    """Return the command that starts a process by default, like Monarch's function of this name."""
    return BootstrapCommand()
