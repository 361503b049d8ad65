"""Functions of torch whose layouts the laptop learns from the workers, and remembers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, NamedTuple
from weakref import ref

from loom.errors import NotSupported
from loom.tensors.grad_modes import grad_enabled, makes_leaves
from loom.tensors.history import Node, link, needs_grad
from loom.tensors.layouts import Meta, dtype_named, plain
from loom.tensors.names import DYNAMIC, FUNCTIONS, METHODS, VIEWING
from loom.tensors.op import MOST_KNOWN, changed, check_home, check_leaf, make_leaf
from loom.tensors.sending.encoding import Constant, Form, T, hashable
from loom.tensors.tensor import Tensor, Value

RELAID = frozenset(
    ("addbmm_", "as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_",
     "transpose_", "unsqueeze_")
)  # fmt: skip
"""Methods in place after which the tensor has another layout."""


class Learned(NamedTuple):
    """The results of a function for some layouts."""

    form: Any
    shape: Any
    """What it returns, with a hole for each tensor: see `loom.tensors.worker.layouts`."""
    metas: tuple[Meta | None, ...]
    """None for a layout that is not known yet, or that depends on elements."""
    gradients: tuple[bool, ...]
    """Through which of them gradients pass."""


class Waiting(NamedTuple):
    """A command whose layouts the next answer of the workers brings."""

    key: Any
    """By which they are remembered; None if they depend on elements."""
    results: list[ref[Tensor]]


class LearnedCall(NamedTuple):
    """A call whose tensors are taken out."""

    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    tensors: list[Tensor]


def taken(args: Sequence[Any], kwargs: Mapping[str, Any]) -> LearnedCall:
    """Take the tensors out of the arguments of a call.

    Raises:
        NotSupported: the call wants its results in a tensor that is given.
    """
    if kwargs.get("out") is not None:
        raise NotSupported("out= is not supported on lazy tensors: use the result")
    tensors: list[Tensor] = []

    def filled(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return T(len(tensors) - 1)
        if isinstance(value, (tuple, list)):
            return list(map(filled, value)) if type(value) is list else tuple(map(filled, value))
        kind = type(value)
        if kind.__module__.partition(".")[0] == "torch":  # a program that has torch, too
            if kind.__name__ in ("layout", "memory_format"):
                return Constant(str(value).removeprefix("torch."))
            if kind.__name__ != "dtype":
                raise TypeError(
                    f"a {kind.__name__} of torch is no argument of lazy tensors: make lt.tensor(…) of it"
                )
            return dtype_named(value)
        return plain(value)

    holed = tuple(map(filled, args))
    named = [
        (key, filled(dtype_named(value) if key == "dtype" and value is not None else value))
        for key, value in kwargs.items()
        if key not in ("device", "out")
    ]
    return LearnedCall(holed, tuple(named), tensors)


def call(home: Any, function: str, args: Sequence[Any], kwargs: Mapping[str, Any], returns: str = "?") -> Any:
    """Queue a function of torch; return its results, whose layouts may be unknown.

    Args:
        function: its name under ``torch``.
        returns: what it returns: ``1`` tensor, or how many; the names of several, with commas; ``value``, no
            tensor; or ``?`` if only the workers know, which are asked once for the layouts of its tensors.
    """
    what = taken(args, kwargs)
    check_home(home, what.tensors)
    key: Any = (
        function,
        hashable((what.args, what.kwargs)),
        tuple([each._meta for each in what.tensors]),
        grad_enabled.get() and any(map(needs_grad, what.tensors)),
    )
    known = home.known.get(key)
    if known is None:
        form = Form(function, what.args, what.kwargs, tensors=len(what.tensors))
        if returns == "value":
            return home.evaluate(form, what.tensors)
        known = _begun(home, form, what.tensors, returns)
        if any(each._meta is None for each in what.tensors):
            key = None
        else:
            _remember(home, key, known)
    form, shape, metas, gradients = known
    idents = [each._value.id for each in what.tensors]
    ident = home._put(form, idents, (), [0 if each is None else each.nbytes for each in metas])
    if home.recorder is not None:
        home.recorder.note(form, what.tensors, (), ident)
    results = [
        _result(home, function, ident + place, meta, gradients[place], what.tensors)
        for place, meta in enumerate(metas)
    ]
    if form.form.learns:
        home.waiting[ident] = Waiting(
            None if function in DYNAMIC or function == ".places" else key, list(map(ref, results))
        )
    return _shaped(shape, results)


def change(function: str, target: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Queue a method of torch that changes a tensor in place; return that.

    Raises:
        RuntimeError: it is a leaf whose gradient is wanted.
    """
    home, name = target._home, function.rpartition(".")[2]
    if name != "requires_grad_":
        check_leaf(target, name.removesuffix("_"))
    what = taken((target, *args), kwargs)
    check_home(home, what.tensors)
    form = home._form(Form(function, what.args, what.kwargs, tensors=len(what.tensors), outs=0))
    home._queue(form, what.tensors)
    changed(target, name.removesuffix("_"), what.tensors[1:])
    if name in RELAID:
        target._meta = None
    return target


def settle(home: Any, ident: int, layouts: Sequence[Any]) -> None:
    """Take in the layouts of a command's results, which the workers have told."""
    waiting = home.waiting.pop(ident, None)
    if waiting is None:
        return
    metas = tuple([Meta(tuple(shape), dtype_named(kind), tuple(strides)) for kind, shape, strides, _ in layouts])
    gradients = tuple([needs for *_, needs in layouts])
    for each, meta, needs in zip(waiting.results, metas, gradients, strict=True):
        if (tensor := each()) is not None and tensor._meta is None:
            tell(tensor, meta, needs)
    known = home.known.get(waiting.key) if waiting.key is not None else None
    if known is not None:
        form = home._form(known.form.form._replace(learns=False))
        home.known[waiting.key] = Learned(form, known.shape, metas, gradients)


def tell(tensor: Tensor, meta: Meta, needs: bool) -> None:
    """Give a tensor its layout."""
    tensor._meta = meta
    if isinstance(tensor._node, Node):
        tensor._node.sure = True
        tensor._needs = tensor._needs and needs


def _begun(home: Any, form: Form, tensors: Sequence[Tensor], returns: str) -> Learned:
    """Return what is known of a function of which nothing was learned yet."""
    shape: Any = T(0)
    outs = 1
    if returns == "?":
        shape, outs = home.structure(form, tensors)
        if shape != T(0):
            form = form._replace(function=".flat", args=(form.function, *form.args))
    elif returns.isdigit():
        outs = int(returns)
        shape = T(0) if outs == 1 else ("tuple", [*map(T, range(outs))])
    else:
        fields = returns.split(",")
        outs = len(fields)
        shape = ("named", form.function.rpartition(".")[2], fields, [*map(T, range(outs))])
    form = form._replace(outs=outs, learns=outs > 0)
    return Learned(home._form(form), shape, (None,) * outs, (True,) * outs)


def _remember(home: Any, key: Any, known: Learned) -> None:
    if len(home.known) >= MOST_KNOWN:
        home.known.clear()
    home.known[key] = known


def _result(
    home: Any, function: str, ident: int, meta: Meta | None, gradient: bool, tensors: Sequence[Tensor]
) -> Tensor:
    value = Value(home.queue, ident)
    if function in VIEWING and tensors:
        result = Tensor(home, value, meta, tensors[0]._base)
        result._root = tensors[0]._root
    else:
        result = Tensor(home, value, meta)
    if grad_enabled.get():
        link(result, function.rpartition(".")[2], tensors)
        if not gradient:
            result._needs = False
    elif makes_leaves.get():
        make_leaf(result, tensors)
    return result


@cache
def _named(name: str, fields: tuple[str, ...]) -> Any:
    return NamedTuple(name, [(field, Any) for field in fields])


def _shaped(shape: Any, results: Sequence[Tensor]) -> Any:
    """Return results in the shape of what a function returns."""
    if isinstance(shape, T):
        return results[shape.place]
    kind, *rest = shape
    match kind:
        case "value":
            return rest[0]
        case "list":
            return [_shaped(each, results) for each in rest[0]]
        case "tuple":
            return tuple([_shaped(each, results) for each in rest[0]])
    name, fields, parts = rest
    return _named(name, tuple(fields))(*[_shaped(each, results) for each in parts])


def function_named(home: Any, name: str) -> Callable[..., Any]:
    """Return a function of torch by its name under ``torch``, or under ``torch.nn.functional``.

    Raises:
        AttributeError: there is none.
    """
    for path in (f"nn.functional.{name}", name):
        if path in FUNCTIONS:
            break
    else:
        if name in METHODS:
            return method_named(name)
        raise AttributeError(f"torch has no function {name!r} that lazy tensors have")
    signature, returns = FUNCTIONS[path]

    def function(*args: Any, **kwargs: Any) -> Any:
        if name.endswith("_") and args and isinstance(args[0], Tensor):
            return change(path, args[0], args[1:], kwargs)
        if returns != "made":
            return call(home, path, args, kwargs, returns)
        if any(isinstance(each, Tensor) for each in args):
            return call(home, path, args, kwargs, "1")
        return home.make(path, args, kwargs)

    return _described(replacing(path, function), name, signature)


def replacing(path: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that changes its operand in place if ``inplace``, its last parameter, is true."""
    signature, _ = FUNCTIONS.get(path, ("", ""))
    if not signature.endswith("inplace=False"):
        return function
    place = signature.count(",")

    @wraps(function)
    def call(input: Tensor, *args: Any, inplace: bool = False, **kwargs: Any) -> Any:
        inplace, args = args[place - 1] if len(args) >= place else inplace, args[: place - 1]
        if inplace:
            return change(path, input, args, {**kwargs, "inplace": True})
        return function(input, *args, **kwargs)

    return call


def method_named(name: str) -> Callable[..., Any]:
    """Return a method of torch's tensors by its name.

    Raises:
        AttributeError: there is none.
    """
    path, table = f"Tensor.{name}", METHODS
    if name not in METHODS:
        path = next((each for each in (f"nn.functional.{name}", name) if each in FUNCTIONS), "")
        if not path or FUNCTIONS[path][1] == "made":
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        table = FUNCTIONS
    signature, returns = table[name if table is METHODS else path]
    if name.endswith("_"):

        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            return change(path, self, args, kwargs)

    else:

        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            return call(self._home, path, (self, *args), kwargs, returns)

    return _described(method, name, signature)


def _described(function: Callable[..., Any], name: str, signature: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"See ``torch``'s ``{name}({signature})``."
    return function
