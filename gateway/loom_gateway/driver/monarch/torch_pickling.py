"""A repair of how Monarch begins to pickle with torch, where several threads do so at once.

Monarch says that it is ready before it has imported torch. Until the import ends, and for good if it fails, another
thread finds no pickler: its call ends with "'NoneType' object is not callable" (torchmonarch 0.7 and 0.8).
"""

from __future__ import annotations

import threading

from monarch._src.actor import pickle as monarch_pickle

_lock = threading.RLock()
_prepare = monarch_pickle._ensure_torch_pickle


def wait_for_torch() -> None:
    """Have each thread of this process that pickles with torch wait until that is prepared."""
    monarch_pickle._ensure_torch_pickle = _prepared


def _prepared() -> None:
    if monarch_pickle._TorchPickler is None:
        with _lock:
            if monarch_pickle._TorchPickler is None:
                monarch_pickle._torch_pickle_initialized = False
                _prepare()
