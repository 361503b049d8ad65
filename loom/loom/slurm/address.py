"""`SlurmAddress`: the address by which `loom.connect` finds an allocation."""

from __future__ import annotations

from typing import NamedTuple

from loom.errors import InvalidAddress
from loom.slurm.spec import NAME
from loom.slurm.ssh import SshAddress, parse_ssh_address


class SlurmAddress(NamedTuple):
    """The address of an allocation of this user's."""

    name: str
    login: SshAddress | None = None
    """The login node to reach it by; None from within the cluster."""

    def __str__(self) -> str:
        return f"slurm://{'' if self.login is None else f'{self.login}/'}{self.name}"


def parse_slurm_address(url: str) -> SlurmAddress:
    """Read ``slurm://NAME``, or ``slurm://[USER@]LOGIN[:PORT]/NAME``.

    Raises:
        InvalidAddress: the URL has another form.
    """
    login, slash, name = url.removeprefix("slurm://").rpartition("/")
    if not url.startswith("slurm://") or not NAME.fullmatch(name):
        raise _not_an_address(url)
    if not slash:
        return SlurmAddress(name)
    try:
        return SlurmAddress(name, parse_ssh_address(f"ssh://{login}"))
    except InvalidAddress:
        raise _not_an_address(url) from None


def _not_an_address(url: str) -> InvalidAddress:
    return InvalidAddress(
        f"{url!r} is no allocation of Slurm: write slurm://USER@LOGIN/NAME, or slurm://NAME within the cluster, "
        "with a name that `loom slurm list` shows"
    )
