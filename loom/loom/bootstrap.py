"""The start of a proc mesh's process, described without Monarch."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from loom.in_cluster import Counterpart, in_cluster


class _MonarchsInCluster(Counterpart):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - a metaclass
        command = super().__call__(*args, **kwargs)
        if not in_cluster():
            return command
        made, arguments = command_for_cluster(command)
        return made(*arguments)


@dataclasses.dataclass
class BootstrapCommand(metaclass=_MonarchsInCluster):
    """The command that starts a process, like Monarch's class of this name, with the cluster's defaults.

    In the cluster it makes Monarch's own.

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
        """Return Monarch's own command, which the driver asks for if it got this object from an older Loom."""
        from loom.actor import monarch_bootstrap_command

        return monarch_bootstrap_command(self)


def command_for_cluster(command: BootstrapCommand) -> tuple[Any, ...]:
    """Return the reduced form of a command, which is Monarch's own in the cluster."""
    from loom.actor import monarch_bootstrap_command  # imports Monarch if that is installed

    # Not the command itself, which would be reduced again, nor its `with_env`, which Monarch's has too.
    fields = {field.name: getattr(command, field.name) for field in dataclasses.fields(command)}
    return monarch_bootstrap_command, (types.SimpleNamespace(**fields),)


def default_bootstrap_cmd() -> BootstrapCommand:
    """Return the command that starts a process by default, like Monarch's function of this name."""
    return BootstrapCommand()
