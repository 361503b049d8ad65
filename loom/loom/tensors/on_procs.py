"""`on`: the tensors of a mesh of processes."""

from __future__ import annotations

import contextlib
from typing import Any

from loom.errors import Invalid
from loom.tensors.tensors import Tensors
from loom.tensors.worker.actor import TensorWorker

STOPS = 30.0
"""Seconds that processes have to stop whose tensors go on in others."""


def on(procs: Any, name: str = "tensors", device: str | None = None) -> Tensors:
    """Return lazy tensors whose operations run in a mesh of processes, in each of them.

    Args:
        procs: a proc mesh; on a laptop a `loom.Job`'s, in the cluster one of Monarch's.
        name: the name of the mesh of their workers, by which another program of the session finds them.
        device: the device of the tensors, as torch calls it; each process's GPU, or else its CPU, if None.
    """

    def spawn(others: Any) -> Any:
        if others is None:
            raise Invalid("give restore() a mesh of processes in which the tensors go on")
        return others.spawn(name, TensorWorker, device)

    return Tensors(spawn(procs), spawn)


def of_job(job: Any, name: str, hosts: int, gpus: int) -> Tensors:
    """Return the lazy tensors of processes of their own: see `loom.Job.tensors`."""
    procs: Any = None

    def spawn(others: Any = None) -> Any:
        nonlocal procs
        if procs is not None:  # those that live would keep their memory
            with contextlib.suppress(Exception):
                procs.stop().get(timeout=STOPS)
        procs = others
        if procs is None:
            where = job.hosts.slice(hosts=slice(hosts))
            procs = where.spawn_procs(per_host={"gpus": gpus}, name=f"{name}-processes")
        return procs.spawn(name, TensorWorker, None)

    found = job.meshes.get(name)
    if found is None:
        return Tensors(spawn(), spawn)
    procs = job.meshes.get(f"{name}-processes")
    return Tensors(found, spawn)
