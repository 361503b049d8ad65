"""The actor that holds tensors and runs commands on them, one in each process of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from loom.actor import Actor, current_rank, current_size, endpoint
from loom.devices import own_torch_device
from loom.errors import SessionTakenOver


class TensorWorker(Actor):
    """Holds the tensors of one program by their ids, and runs its commands on them, in order.

    Args:
        device: the device of the tensors, as torch calls it; the process's GPU, or else the CPU, if None.
    """

    def __init__(self, device: str | None = None) -> None:
        import torch

        from loom.tensors.worker.summaries import Watched

        self._device = torch.device(own_torch_device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
        self._program = ""
        self._values: Any = None
        self._kept: dict[str, Any] = {}
        self._watched = Watched()
        self._group: Any = None

    @endpoint
    def begin(self, program: str) -> str:
        """Take the commands of a program from now on; return the device. Of an earlier one only names stay."""
        from loom.tensors.worker.values import Values

        self._program = program
        if prod(current_size().values()) > 1:
            import torch

            from loom.tensors.worker.process_group import Group

            self._group = self._group or Group(self._device)
            torch.manual_seed(int(program[:15], 16))  # the same in each process
        self._values = Values(self._device, self._kept, self._group, current_rank().rank == 0)
        self._values.watched = self._watched
        return str(self._device)

    @endpoint
    def meet(self, program: str) -> tuple[str, int]:
        """Return where the processes find each other. Called in the first of them."""
        self._of(program)
        return self._group.meet()  # type: ignore[no-any-return]

    @endpoint
    def join(self, program: str, store: tuple[str, int], sizes: dict[str, int]) -> None:
        """Become one of a group, if this is in none, so that tensors can be spread over the processes."""
        self._of(program)
        self._group.join(store, current_rank().rank, sizes)

    @endpoint
    def run(self, program: str, batch: int, commands: bytes, data: Sequence[bytes]) -> list[Any]:
        """Run a batch of commands; return those that failed."""
        return self._of(program).run(batch, commands, data)  # type: ignore[no-any-return]

    @endpoint
    def read(
        self,
        program: str,
        batch: int,
        commands: bytes | None,
        data: Sequence[bytes],
        idents: Sequence[int],
        what: str,
    ) -> tuple[list[Any], list[Any]]:
        """Run a batch, if there is one; return what failed, and in the first process what was asked of tensors."""
        return self._of(program).read(batch, commands, data, idents, what)  # type: ignore[no-any-return]

    @endpoint
    def kept(self, program: str) -> dict[str, Any]:
        """Return the layouts of the tensors with a name."""
        from loom.tensors.worker.layouts import layout

        self._of(program)
        return {name: (layout(tensor), needs) for name, (tensor, needs) in self._kept.items()}

    @endpoint
    def save(self, program: str, path: str | None, mark: int, last: int) -> int | str:
        """Write the tensors to files; return the bytes, or what went wrong."""
        from loom.tensors.worker import checkpoints

        return checkpoints.save(self._of(program), current_rank().rank, program, path, mark, last)

    @endpoint
    def load(self, program: str, path: str | None, mark: int, first: int, freed: Sequence[int]) -> str:
        """Take the tensors of a checkpoint, but for those that are freed; return what went wrong, or ""."""
        from loom.tensors.worker import checkpoints

        return checkpoints.load(self._of(program), current_rank().rank, program, path, mark, first, freed)

    @endpoint
    def watched(self, wanted: Any) -> tuple[dict[str, Any], int]:
        """Return summaries of watched tensors by name, and how many names are left out. Any program may ask."""
        return self._watched.newest(wanted)

    def _of(self, program: str) -> Any:
        if program != self._program:
            raise SessionTakenOver(
                "another program has taken over these tensors; those with a name are in lt.named"
            )
        return self._values
