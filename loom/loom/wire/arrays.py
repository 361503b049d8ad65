"""Large data in payloads: arrays, tensors and byte strings.

Each object is taken apart into a *recipe*, a small pickle of everything but the data, and the data itself, which
travels next to the payload's pickle and is not copied into it. Only the program that uses an object puts it
together again. The driver passes it on as a `Carried` object, for which it needs neither numpy nor torch, and lets
its other threads run while a gigabyte is pickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import operator
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from loom.wire.messages import Buffer, turns
from loom.wire.mux import Pieces

IN_BAND = 16 << 10
"""Buffers smaller than this many bytes stay in the pickle: a part of their own would cost more than the copy."""

_DEPTH = 4  # levels of tuples, lists and dicts in which large data is searched for
_MOST_ITEMS = 4096  # items of the longest tuple, list or dict that is searched
_SCALARS = frozenset({type(None), bool, int, float, complex, str})

_state = threading.local()  # whether this thread is `passing_on` objects


class Carried:
    """An object taken apart. Pickling and unpickling it gives the object again."""

    def __init__(self, recipe: Buffer, parts: Sequence[Buffer | Pieces]) -> None:
        self.recipe = recipe
        self.parts = parts

    def value(self) -> Any:
        """Return the object. It shares the data of parts that `whole` returns without a copy."""
        return pickle.loads(self.recipe, buffers=[whole(part) for part in self.parts])

    def __reduce__(self) -> Any:
        cut = [(_is_read_only(part), [_Piece(view) for view in _cut(part)]) for part in self.parts]
        return _rebuild, (bytes(self.recipe), cut)


class _Piece:
    """A piece of data in a pickle. Pickling it runs Python code, so that other threads get their turn."""

    __slots__ = ("view",)

    def __init__(self, view: memoryview) -> None:
        self.view = view

    def __reduce__(self) -> Any:
        return _piece, (bytes(self.view),)


def _piece(data: bytes) -> bytes:
    # Needed only as Python code: unpickling in C alone would keep every other thread waiting to the end.
    return data


def _rebuild(recipe: bytes, cut: Sequence[tuple[bool, Sequence[bytes]]]) -> Any:
    return carried_or_value(Carried(recipe, [Pieces(pieces, read_only) for read_only, pieces in cut]))


def carried_or_value(carried: Carried) -> Any:
    """Return the object, or the `Carried` itself while this thread is `passing_on` objects."""
    return carried if getattr(_state, "passing_on", False) else carried.value()


@contextlib.contextmanager
def passing_on() -> Iterator[None]:
    """Leave the objects that this thread unpickles in the block taken apart."""
    before = getattr(_state, "passing_on", False)
    _state.passing_on = True
    try:
        yield
    finally:
        _state.passing_on = before


def whole(part: Buffer | Pieces) -> Buffer:
    """Return a part as one buffer: ``bytes`` if it is read-only in its object, else a writable one.

    A read-only view is a view of received bytes, whose object may be writable all the same. So it is copied.
    """
    if isinstance(part, Pieces):
        if not part.read_only:
            writable = bytearray()
            for view in _cut(part):
                writable += view
            return writable
        joined = io.BytesIO()
        for view in _cut(part):
            joined.write(view)
        return joined.getvalue()
    return part if type(part) is bytes or not memoryview(part).readonly else bytearray(part)


def _is_read_only(part: Buffer | Pieces) -> bool:
    return part.read_only if isinstance(part, Pieces) else type(part) is bytes


def _cut(part: Buffer | Pieces) -> Iterator[memoryview]:
    for piece in part if isinstance(part, Pieces) else (part,):
        yield from turns(piece)


def take_apart_near_top(obj: Any, least: int = IN_BAND) -> Any:
    """Take large data apart: the object itself, or items in its tuples, lists and dicts.

    Data in other objects stays, since unpickling those needs the data whole.
    """
    return _near_top(obj, least, _DEPTH, {})


def _near_top(obj: Any, least: int, depth: int, seen: dict[int, Any]) -> Any:
    kind = type(obj)
    if kind in _SCALARS:
        return obj
    if id(obj) in seen:  # an object that is there twice must stay one object
        return seen[id(obj)]
    apart = obj
    if kind is tuple or kind is list:
        if depth and len(obj) <= _MOST_ITEMS:
            items = [_near_top(item, least, depth - 1, seen) for item in obj]
            if any(map(operator.is_not, items, obj)):
                apart = kind(items)
    elif kind is dict:
        if depth and len(obj) <= _MOST_ITEMS:
            items = [_near_top(item, least, depth - 1, seen) for item in obj.values()]
            if any(map(operator.is_not, items, obj.values())):
                apart = dict(zip(obj, items, strict=True))
    else:
        apart = take_apart(obj, least) or obj
    seen[id(obj)] = apart
    return apart


def take_apart(obj: Any, least: int = IN_BAND) -> Carried | None:
    """Take an object apart; return None for kinds that cannot be, which pickle in the usual way.

    This takes apart ``bytes``, ``bytearray`` and numpy arrays of at least ``least`` bytes, and dense tensors of any
    size in main memory or on a GPU, so that the driver can pass them on without torch, and without a GPU. A tensor
    without gaps keeps its strides; of one with gaps, such as a column of a matrix, only the elements travel. One of
    a GPU is put on the GPU with the same number where it arrives, or left in main memory if there is none.
    """
    kind = type(obj)
    if kind is bytes or kind is bytearray:
        return _taken_apart(_Reduced(kind, pickle.PickleBuffer(obj))) if len(obj) >= least else None
    module = kind.__module__
    if module == "numpy" and kind is getattr(sys.modules.get("numpy"), "ndarray", None):
        return _array(obj) if obj.nbytes >= least else None
    if module in ("torch", "torch.nn.parameter"):
        return _tensor(obj)
    return None


def _taken_apart(obj: Any) -> Carried:
    parts: list[Buffer | Pieces] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if len(view) < IN_BAND:
            return True
        if not view.readonly:
            parts.append(view)
        else:
            parts.append(view.obj if type(view.obj) is bytes else Pieces([view], True))
        return False

    recipe = pickle.dumps(obj, 5, buffer_callback=keep)
    return Carried(recipe, parts)


class _Reduced:
    """An object that pickles as a call of a function."""

    __slots__ = ("call",)

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def _array(array: Any) -> Carried | None:
    if array.dtype.hasobject:
        return None
    flags = array.flags
    return _taken_apart(array if flags.c_contiguous or flags.f_contiguous else array.copy())


def _tensor(obj: Any) -> Carried | None:
    torch = sys.modules["torch"]
    kind = type(obj)
    is_parameter = kind is torch.nn.Parameter
    if kind is not torch.Tensor and not is_parameter:
        return None
    plain = (
        obj.device.type in ("cpu", "cuda")
        and obj.layout is torch.strided
        and not (obj.is_quantized or obj.is_conj() or obj.is_neg())
        and not (vars(obj) or obj._backward_hooks)
    )
    if not plain:
        return None
    with torch.no_grad():
        data = obj.detach()
        if not _is_dense(data):
            data = data.contiguous()
        data = data.cpu()
        size, stride = tuple(data.shape), data.stride()
        try:
            view = _memory_of(data)
        except RuntimeError:  # the tensor has no memory of its own, for example inside torch.func
            return None
    memory = pickle.PickleBuffer(view), data.dtype, size, stride
    if obj.is_cuda:
        return _taken_apart(_Reduced(_rebuild_on_gpu, obj.device.index, memory, obj.requires_grad, is_parameter))
    return _taken_apart(_Reduced(_rebuild_tensor, *memory, obj.requires_grad, is_parameter))


def _is_dense(tensor: Any) -> bool:
    """Return whether the elements lie in memory without gaps, each once, in any order."""
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return True
        if size > 1:
            if stride != span:
                return False
            span *= size
    return True


def _memory_of(tensor: Any) -> Any:
    # Not through numpy, which has no bfloat16 and may be missing.
    address, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    if not size:
        return bytearray()
    memory: Any = (ctypes.c_ubyte * size).from_address(address)
    memory.owner = tensor  # keeps the tensor alive as long as any view of its memory
    return memory


def _rebuild_tensor(
    data: Buffer,
    dtype: Any,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
) -> Any:
    return _with_gradient(_from_memory(data, dtype, size, stride), requires_grad, is_parameter)


def _rebuild_on_gpu(index: int, memory: tuple[Any, ...], requires_grad: bool, is_parameter: bool) -> Any:
    tensor = _from_memory(*memory)
    cuda = sys.modules["torch"].cuda
    if cuda.is_available() and index < cuda.device_count():
        tensor = tensor.to(f"cuda:{index}")
    return _with_gradient(tensor, requires_grad, is_parameter)


def _from_memory(data: Buffer, dtype: Any, size: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    torch = sys.modules["torch"]  # imported by the pickle, which names the dtype
    if len(data):
        return torch.frombuffer(data, dtype=dtype).as_strided(size, stride)
    return torch.empty_strided(size, stride, dtype=dtype)


def _with_gradient(tensor: Any, requires_grad: bool, is_parameter: bool) -> Any:
    if is_parameter:
        return sys.modules["torch"].nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor
