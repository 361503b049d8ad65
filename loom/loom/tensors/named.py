"""`NamedTensors`: tensors that the session keeps by their names."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from loom.tensors.commands import Form, T
from loom.tensors.dtypes import dtype_named
from loom.tensors.metas import Meta
from loom.tensors.tensor import Tensor, Value


class NamedTensors(MutableMapping[str, Tensor]):
    """The tensors of a mesh by name."""

    def __init__(self, home: Any) -> None:
        self._home = home

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        form = Form(".keep", (T(0), str(name), tensor.requires_grad), tensors=1, outs=0)
        self._home._queue(self._home._form(form), (tensor,))

    def __getitem__(self, name: str) -> Tensor:
        (kind, shape, strides, _), needs = self._home._dispatcher.kept()[name]
        ident = self._home._queue(self._home._form(Form(".kept", (name,))), ())
        meta = Meta(tuple(shape), dtype_named(kind), tuple(strides))
        tensor = Tensor(self._home, Value(self._home.queue, ident), meta)
        return tensor.requires_grad_() if needs else tensor

    def __delitem__(self, name: str) -> None:
        if name not in self._home._dispatcher.kept():
            raise KeyError(name)
        self._home._queue(self._home._form(Form(".forget", (name,), outs=0)), ())

    def __iter__(self) -> Iterator[str]:
        return iter(self._home._dispatcher.kept())

    def __len__(self) -> int:
        return len(self._home._dispatcher.kept())
