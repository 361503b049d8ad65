"""Loom: drive a Monarch actor mesh inside a cluster from a laptop or a notebook.

Public names are imported on first use (PEP 562), so that ``import loom`` costs milliseconds and needs neither torch
nor torchmonarch. ``__init__.pyi`` lists them, for this module and for type checkers::

    import loom

    class Counter(loom.Actor):
        def __init__(self, start): self.n = start
        @loom.endpoint
        def add(self, k): self.n += k; return self.n

    with loom.local(hosts=2) as job:
        counters = job.hosts.spawn_procs(per_host={"gpus": 2}).spawn("counters", Counter, 10)
        print(counters.add.call(1).get())
"""

from __future__ import annotations

from loom import _former_names
from loom._lazy import lazy_names
from loom._version import __version__ as __version__

_former_names.install()

__getattr__, __dir__ = lazy_names(__name__, __file__)
