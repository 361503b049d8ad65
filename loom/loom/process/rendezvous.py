"""A store of torch's, where the processes of a group find each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loom.process.listen import listen

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def open_store(address: str) -> TCPStore:
    """Return a store that listens on one address of this machine; torch's own listens on all."""
    from torch.distributed import TCPStore

    listener = listen(address, 0)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
