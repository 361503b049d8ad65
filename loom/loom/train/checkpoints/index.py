"""`IndexReader`: a reader of what torch writes as a distributed checkpoint, whose index cannot run code.

The index, ``.metadata``, is a pickle, which torch loads as any other.
"""

from __future__ import annotations

import enum
import pathlib
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata

from loom.errors import CheckpointBroken

_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")


class IndexReader(FileSystemReader):  # type: ignore[misc]
    """A reader of a checkpoint's tensors. Raises `CheckpointBroken` if the index has anything but their places."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with open(pathlib.Path(self.path) / ".metadata", "rb") as file:
            try:
                index = _IndexUnpickler(file).load()
            except OSError:
                raise
            except Exception as error:  # garbage that is unpickled can raise anything
                reason = str(error) or type(error).__name__
                raise CheckpointBroken(f"the checkpoint {self.path} has an index that is none: {reason}") from error
        if not isinstance(index, metadata.Metadata):
            raise CheckpointBroken(f"the checkpoint {self.path} has an index that is a {type(index).__name__}")
        if index.storage_meta is None:
            index.storage_meta = metadata.StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found: Any = None
        if module == metadata.__name__:
            found = getattr(metadata, name, None)
            found = found if getattr(found, "__module__", None) == module else None
        elif (module, name) == (filesystem.__name__, "_StorageInfo"):
            found = filesystem._StorageInfo
        elif (module, name) == ("torch.serialization", "_get_layout"):
            found = torch.serialization._get_layout
        elif (module, name) == ("builtins", "getattr"):
            found = _member
        elif module == "pathlib" and name in _PATHS:
            found = pathlib.PurePosixPath
        elif module == "torch":
            found = getattr(torch, name, None)
            found = found if found is torch.Size or isinstance(found, torch.dtype) else None
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found


def _member(of: Any, name: Any) -> enum.Enum:
    """Return a member of an enumeration: Python 3.11.0 to 3.11.3, as in Debian 12, pickles it as an attribute."""
    if not (isinstance(of, type) and issubclass(of, enum.Enum) and name in of.__members__):
        raise pickle.UnpicklingError(f"it names {name} of {of}")
    return of.__members__[name]
