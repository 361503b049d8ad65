"""`call`: queues a function of torch. The layouts of its results come of a rule here, or the workers tell them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple
from weakref import ref

from loom.errors import NotSupported
from loom.tensors.grad_modes import grad_enabled, makes_leaves
from loom.tensors.history import Node, link, needs_grad, relink
from loom.tensors.layouts import PLAIN, DtypeKind, Meta, Misfit, dtype_named, fits, plain
from loom.tensors.names import DYNAMIC, FUNCTIONS, METHODS, SWITCHES, VIEWING, WITHOUT_GRADIENT
from loom.tensors.sending.encoding import Constant, Form, Numbered, S, T, hashable
from loom.tensors.tensor import Tensor, Value

MOST_KNOWN = 65_536
"""Calls whose results are remembered, by the layouts of their tensors."""

RULES: dict[str, Callable[..., Any]] = {}
"""The layouts of results, by a function's name without ``Tensor.`` and ``nn.functional.``, or with it.

A rule takes the arguments of a call, a `Meta` for each tensor. It returns a `Meta`, or several in a tuple; None if
only the workers know. If it raises one of `UNKNOWN_CALL`, torch in the workers is asked what is wrong."""

UNKNOWN_CALL = (Misfit, AttributeError, LookupError, TypeError, ValueError)

ELEMENTWISE: set[str] = set()
"""The functions that compute each element of the result by those in its place: their numbers differ each time."""

COPYING = frozenset(("contiguous", "cpu", "reshape_as", "to"))
"""Functions that torch calls views, and which copy when they are called here."""

RELAID = frozenset(
    ("addbmm_", "as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_",
     "transpose_", "unsqueeze_")
)  # fmt: skip
"""Methods in place after which the tensor has another layout."""

_NAMED_AS_IN_NUMPY = {"axis": "dim", "keepdims": "keepdim"}


@cache
def base(path: str) -> str:
    """Return a function's name without what it is a member of, if that is tensors or ``nn.functional``."""
    return path.removeprefix("Tensor.").removeprefix("nn.functional.")


class Function:
    """A function of torch, or one of the worker's, as it is called.

    Args:
        path: its name under ``torch``.
        returns: what it returns: ``1`` tensor, or how many; the names of several, with commas; ``value``, no
            tensor; or ``?`` if only a rule or the workers know, which are asked once.
        in_place: whether it changes its first tensor.
    """

    __slots__ = ("in_place", "name", "path", "returns", "rule", "varying", "view")

    def __init__(self, path: str, returns: str = "1", in_place: bool = False) -> None:
        self.path = path
        self.returns = returns
        self.name = path.rpartition(".")[2]
        self.in_place = in_place or self.name.endswith("_")
        found = base(path).removesuffix("_")
        self.rule = RULES.get(path) or RULES.get(found)
        self.varying = found in ELEMENTWISE
        self.view = path in VIEWING and found not in COPYING


function_at = cache(Function)
"""Returns the one `Function` of a path, and of what that returns."""


class Known(NamedTuple):
    """The results of a call for some layouts."""

    form: Numbered
    tree: Any
    """Its return value, with a hole for each tensor: see `loom.tensors.worker.layouts`; None for one tensor."""
    metas: tuple[Meta | None, ...]
    """None for a layout that is not known yet, or that depends on elements."""
    sizes: tuple[int, ...]
    passes: tuple[bool, ...]
    """Through which of them gradients pass."""


class Waiting(NamedTuple):
    """A command whose layouts the next answer of the workers brings."""

    key: Any
    """By which they are remembered; None if they depend on elements."""
    results: list[ref[Tensor]]


def call(home: Any, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
    """Queue a function; return its results, whose layouts may be unknown. One in place returns its first tensor.

    Raises:
        NotSupported: the call wants its results in a tensor that is given.
        RuntimeError: tensors are of several meshes; or the first one cannot be changed in place.
    """
    tensors: list[Tensor] = []
    numbers: list[Any] = []
    key: list[Any] = [function]
    varying = function.varying
    for each in args:
        kind = type(each)
        if kind is Tensor:
            tensors.append(each)
            key.append(each._meta)
        elif varying and kind in PLAIN:
            numbers.append(each)
            key.append(kind)
        else:
            key.append(_part(each, tensors))
    kwargs = sendable(kwargs) if kwargs else {}
    for name, each in kwargs.items():
        key.append(name)
        if varying and type(each) in PLAIN:
            numbers.append(each)
            key.append(type(each))
        else:
            key.append(_part(each, tensors))
    grad, needs = grad_enabled.get(), False
    for each in tensors:
        if each._home is not home:
            raise RuntimeError("Expected all tensors to be on the same mesh, but found those of two")
        if grad and (each._needs or each._root.needs):
            needs = True
    key.append(needs)
    if function.in_place:
        check_leaf(tensors[0], function.name.removesuffix("_"))
    place = tuple(key)
    known = home._known.get(place)
    if known is None:
        if any(each._meta is None for each in tensors):
            place = ()
        known = _learn(home, function, args, kwargs, place)
    return run(home, function, known, tensors, tuple(numbers), place)


def run(
    home: Any,
    function: Function,
    known: Known,
    tensors: Sequence[Tensor],
    numbers: tuple[Any, ...],
    key: Any = None,
) -> Any:
    """Queue a call whose results are known.

    Args:
        home: the tensors' home.
        function: what is called.
        known: what it gives.
        tensors, numbers: what is put in the holes of its form.
        key: by which ``known`` is remembered; empty if it is not.
    """
    form, tree, metas, sizes, passes = known
    if not metas and not function.in_place:
        return _filled(tree, ())
    ident = home._put(form, [each._value.id for each in tensors], numbers, sizes)
    if home._recorder is not None:
        home._recorder.note(form, tensors, numbers, ident)
    if function.in_place:
        target = tensors[0]
        changed(target, function.name.removesuffix("_"), tensors[1:])
        if function.name in RELAID:
            target._meta = None
        return target
    if tree is None and not form.form.learns:
        return _result(home, function, ident, metas[0], passes[0], tensors)
    results = [
        _result(home, function, ident + place, meta, passes[place], tensors) for place, meta in enumerate(metas)
    ]
    if form.form.learns:
        waits = None if function.path in DYNAMIC or function.path == ".places" else key
        home._waiting[ident] = Waiting(waits, list(map(ref, results)))
    return results[0] if tree is None else _filled(tree, results)


def _result(
    home: Any, function: Function, ident: int, meta: Meta | None, passes: bool, tensors: Sequence[Tensor]
) -> Tensor:
    value = Value(home._pending, ident)
    if function.view and tensors:
        first = tensors[0]
        result = Tensor(home, value, meta, first._base)
        result._root = first._root
    else:
        result = Tensor(home, value, meta)
    if grad_enabled.get():
        link(result, function.name, tensors)
        if not passes:
            result._needs = False
    elif makes_leaves.get():
        make_leaf(result, tensors)
    return result


# Arguments


def _part(value: Any, tensors: list[Tensor]) -> Any:
    """Return a key of an argument, and add its tensors."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value._meta
    if isinstance(value, (tuple, list)) and type(value) is not Constant:
        return (type(value), *[_part(each, tensors) for each in value])
    return hashable(sent(value))


def sent(value: Any) -> Any:
    """Return an argument that is no tensor as it travels.

    Raises:
        TypeError: it is an object of torch's that does not.
    """
    kind = type(value)
    if kind is type:
        return dtype_named(value)
    if kind.__module__.partition(".")[0] == "torch":  # a program that has torch, too
        if kind.__name__ in ("layout", "memory_format"):
            return Constant(str(value).removeprefix("torch."))
        if kind.__name__ != "dtype":
            hint = "make lt.tensor(…) of it" if hasattr(value, "untyped_storage") else "it does not travel"
            raise TypeError(f"a {kind.__name__} of torch is no argument of lazy tensors: {hint}")
        return dtype_named(value)
    return plain(value)


def sendable(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return named arguments as they travel: the device is that of the workers.

    Raises:
        NotSupported: they want the result in a tensor that is given.
    """
    if kwargs.get("out") is not None:
        raise NotSupported("out= is not supported on lazy tensors: use the result")
    found = {name: each for name, each in kwargs.items() if name not in ("device", "out")}
    if found.get("dtype") is not None:
        found["dtype"] = dtype_named(found["dtype"])
    return found


def _mapped(value: Any, of_tensor: Callable[[Tensor], Any]) -> Any:
    """Return an argument with something else for each tensor."""
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, (tuple, list)) and type(value) is not Constant:
        return (list if isinstance(value, list) else tuple)([_mapped(each, of_tensor) for each in value])
    return sent(value)


def _meta_of(tensor: Tensor) -> Meta:
    return tensor.meta


# Results


class Formed(NamedTuple):
    """A call with holes."""

    form: Form
    tensors: list[Tensor]
    types: tuple[type, ...]
    """Those of the numbers that may differ each time."""


def formed(path: str, args: Sequence[Any], kwargs: Mapping[str, Any], varying: bool = False) -> Formed:
    """Return a call of a function with holes for its tensors, and for its numbers if these vary."""
    tensors: list[Tensor] = []
    types: list[type] = []

    def hole_of(tensor: Tensor) -> T:
        tensors.append(tensor)
        return T(len(tensors) - 1)

    def hole(value: Any) -> Any:
        if varying and type(value) in PLAIN:
            types.append(type(value))
            return S(len(types) - 1)
        return _mapped(value, hole_of)

    holes = tuple(map(hole, args))
    named = tuple([(name, hole(each)) for name, each in kwargs.items()])
    return Formed(Form(path, holes, named, len(tensors), len(types)), tensors, tuple(types))


def _learn(home: Any, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], key: Any) -> Known:
    """Return what a call gives of which nothing is known, and remember it by a key, if that is not empty."""
    known = _first_known(home, function, args, kwargs)
    if key:
        if len(home._known) >= MOST_KNOWN:
            home._known.clear()
        home._known[key] = known
    return known


def _first_known(home: Any, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Known:
    form, tensors, types = formed(function.path, args, kwargs, function.varying)
    out, asked = None, True
    if function.rule is not None:
        asked = function.returns == "?" or all(each._meta is not None for each in tensors)
        out = _ruled(home, function, args, kwargs) if asked else None
    if function.in_place:
        return Known(home._form(form._replace(outs=0), types), None, (), (), ())
    if out is not None:
        found: list[Meta] = []
        tree = _tree(out, found)
        metas: tuple[Meta | None, ...] = tuple(found)
        sizes = () if function.view else tuple([each.nbytes for each in found])
    else:
        sizes = ()
        tree, outs = _returned(function) or home._structure(form, tensors)
        metas = (None,) * outs
        form = form._replace(learns=asked and outs > 0)
    if tree == T(0):
        tree = None
    elif len(metas) == 1 or (function.returns == "?" and out is None):
        form = form._replace(function=".flat", args=(form.function, *form.args))
    form = form._replace(outs=len(metas))
    return Known(home._form(form, types), tree, metas, sizes, (True,) * len(metas))


def _ruled(home: Any, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the layouts that a function's rule gives; None if the workers know of the call, and the rule does not.

    Raises:
        OperationFailed: torch refuses the call.
    """
    assert function.rule is not None
    given = [_mapped(each, _meta_of) for each in args]
    named = {_NAMED_AS_IN_NUMPY.get(name, name): _mapped(each, _meta_of) for name, each in kwargs.items()}
    try:
        out = function.rule(*given, **named)
        if function.in_place and function.varying and out is not None:
            own = given[0]
            fits(out.shape == own.shape and out.dtype.kind <= own.dtype.kind)
            fits(own.dtype.kind is not DtypeKind.COMPLEX or out.dtype.kind is not DtypeKind.FLOAT)
        return out
    except UNKNOWN_CALL:
        form, tensors, _ = formed(function.path, args, kwargs)
    home._structure(form, tensors)
    return None


def _unknown(*args: Any, **kwargs: Any) -> None:
    raise Misfit


@cache
def _asked_first(path: str) -> Function:
    function = Function(path, in_place=path == ".setitem")
    function.rule = _unknown
    return function


def call_asked(home: Any, path: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
    """Queue a function as `call` does, when the workers have said that torch does not refuse it.

    Raises:
        OperationFailed: torch refuses it.
    """
    return call(home, _asked_first(path), args, kwargs)


def _tree(out: Any, found: list[Meta]) -> Any:
    """Return what a rule gives with a hole for each layout, and add these."""
    if isinstance(out, Meta):
        found.append(out)
        return T(len(found) - 1)
    parts = [_tree(each, found) for each in out]
    return ("named", type(out).__name__, list(out._fields), parts) if hasattr(out, "_fields") else ("tuple", parts)


def _returned(function: Function) -> tuple[Any, int] | None:
    """Return what a function returns, and how many tensors that has; None if only the workers know."""
    returns = function.returns
    if returns == "?":
        return None
    if returns.isdigit():
        outs = int(returns)
        return (T(0) if outs == 1 else ("tuple", [*map(T, range(outs))])), outs
    fields = returns.split(",")
    return ("named", function.name, fields, [*map(T, range(len(fields)))]), len(fields)


@cache
def _named(name: str, fields: tuple[str, ...]) -> Any:
    return NamedTuple(name, [(field, Any) for field in fields])


def _filled(tree: Any, results: Sequence[Tensor]) -> Any:
    """Return results in the shape of what a function returns."""
    if isinstance(tree, T):
        return results[tree.place]
    kind, *rest = tree
    match kind:
        case "value":
            return rest[0]
        case "list":
            return [_filled(each, results) for each in rest[0]]
        case "tuple":
            return tuple([_filled(each, results) for each in rest[0]])
    name, fields, parts = rest
    return _named(name, tuple(fields))(*[_filled(each, results) for each in parts])


def settle(home: Any, ident: int, layouts: Sequence[Any]) -> None:
    """Take in the layouts of a command's results, which the workers have told."""
    waiting = home._waiting.pop(ident, None)
    if waiting is None:
        return
    try:
        metas = tuple(
            [Meta(tuple(shape), dtype_named(kind), tuple(strides)) for kind, shape, strides, _ in layouts]
        )
    except TypeError:  # of a dtype that is not known here: whoever looks is told
        return
    passes = tuple([needs for *_, needs in layouts])
    for each, meta, needs in zip(waiting.results, metas, passes, strict=True):
        if (tensor := each()) is not None and tensor._meta is None:
            tell(tensor, meta, needs)
    known = home._known.get(waiting.key) if waiting.key else None
    if known is not None:
        form = home._form(known.form.form._replace(learns=False))
        sizes = tuple([each.nbytes for each in metas])
        home._known[waiting.key] = Known(form, known.tree, metas, sizes, passes)


def tell(tensor: Tensor, meta: Meta, needs: bool) -> None:
    """Give a tensor its layout."""
    tensor._meta = meta
    if isinstance(tensor._node, Node):
        tensor._node.sure = True
        tensor._needs = tensor._needs and needs


# In place


def check_leaf(target: Tensor, name: str) -> None:
    """Check that a tensor may be changed in place by an operation.

    Raises:
        RuntimeError: it is a leaf whose gradient is wanted, in torch's words.
    """
    if name in WITHOUT_GRADIENT:
        return
    if grad_enabled.get() and target._needs and target._node is None and not target._root.needs:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")


def changed(target: Tensor, name: str, others: Sequence[Tensor]) -> None:
    """Note that a tensor was changed in place by an operation with others."""
    target._base.version += 1
    if name not in WITHOUT_GRADIENT and grad_enabled.get() and any(map(needs_grad, (target, *others))):
        meta = target._meta
        if meta is None or meta.dtype.kind >= DtypeKind.FLOAT:
            relink(target, name, others)


def make_leaf(result: Tensor, inputs: Sequence[Tensor]) -> None:
    """Make a result a leaf again, if it was computed from one: see `loom.tensors.grad_modes.no_grad`."""
    for each in inputs:
        if each._needs and each._node is None and result.meta.dtype.kind >= DtypeKind.FLOAT:
            result.requires_grad_()
            return


# By name


def function_named(home: Any, name: str) -> Callable[..., Any]:
    """Return a function of torch by its name under ``torch``, or under ``torch.nn.functional``.

    Raises:
        AttributeError: there is none.
    """
    for path in (f"nn.functional.{name}", name):
        if path in FUNCTIONS:
            return _named_call(path, FUNCTIONS[path], home)
    if name in METHODS:
        return _named_call(f"Tensor.{name}", METHODS[name], home)
    raise AttributeError(f"torch has no function {name!r} that lazy tensors have")


def method_named(name: str) -> Callable[..., Any]:
    """Return a method of torch's tensors by its name.

    Raises:
        AttributeError: there is none.
    """
    if name in METHODS:
        return _named_call(f"Tensor.{name}", METHODS[name])
    for path in (f"nn.functional.{name}", name):
        if FUNCTIONS.get(path, "made") != "made":
            return _named_call(path, FUNCTIONS[path])
    raise AttributeError(f"'Tensor' object has no attribute {name!r}")


def _named_call(path: str, returns: str, home: Any = None) -> Callable[..., Any]:
    """Return a function that queues another one: for the tensors of a home, or for those of its first argument."""
    switch, place = SWITCHES.get(path, ("", 0))
    function = Function(path, "1" if returns == "made" or switch == "return_indices" else returns)
    switched = Function(path, "2", in_place=switch == "inplace")

    def queued(*args: Any, **kwargs: Any) -> Any:
        where = args[0]._home if home is None else home
        if returns == "made" and not any(isinstance(each, Tensor) for each in args):
            return where._make(path, args, kwargs)
        if returns == "value":
            return where._evaluate(function, args, kwargs)
        if switch and kwargs.get(switch, len(args) > place and args[place]):
            return call(where, switched, args, kwargs)
        return call(where, function, args, kwargs)

    queued.__name__ = queued.__qualname__ = function.name
    queued.__doc__ = f"See ``torch.{path}``."
    return queued
