"""`on`: the tensors of a mesh of processes."""

from __future__ import annotations

from typing import Any

from loom.tensors import methods
from loom.tensors.backend.worker import TensorWorker
from loom.tensors.tensors import Tensors

methods.put()


def on(procs: Any, name: str = "tensors", device: str | None = None) -> Tensors:
    """Return lazy tensors whose operations run in a mesh of processes, in each of them.

    Args:
        procs: a proc mesh; on a laptop a `loom.Job`'s, in the cluster one of Monarch's.
        name: the name of the mesh of their workers, by which another program of the session finds them.
        device: the device of the tensors, as torch calls it; each process's GPU, or else its CPU, if None.
    """
    return Tensors(procs.spawn(name, TensorWorker, device))


def again(workers: Any) -> Tensors:
    """Return the lazy tensors of workers that an earlier program has made, which cannot use them any more."""
    return Tensors(workers)
