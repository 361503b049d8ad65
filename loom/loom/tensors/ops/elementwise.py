"""`Elementwise`, a function that is computed element by element, and the rules of which dtype it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from operator import is_
from typing import Any

from loom.tensors.autograd import Node
from loom.tensors.commands import S, T
from loom.tensors.dtypes import DEFAULT, DType, Kind, bool_, of_scalar, plain, result_type, uint8
from loom.tensors.metas import Meta, check_written, pointwise_meta
from loom.tensors.op import ELEMENTWISE, Op, methods
from loom.tensors.tensor import Tensor

Number = bool | int | float | complex

OPERAND = (Tensor, int, float, complex)
"""What arithmetic takes. Python's operators leave everything else to the other operand."""

MOST_TYPES = 64
"""Choices of the operands' types that a function remembers."""

NAMES = "xyz"
"""What derivatives call the operands."""

Derivative = Callable[..., Any]
"""The gradient of an operand, computed from the result's gradient and from what the other parameters name.

``x``, ``y`` and ``z`` are the operands, each a tensor or a number; ``out`` is the result. Any other name is one of
the function's further arguments."""

DTypeRule = Callable[[Sequence[Meta], tuple[Any, ...], Mapping[str, Any]], DType]
"""The result's dtype, of the tensors' metas, the numbers among the operands, and the further arguments by name."""


class Elementwise:
    """A function of up to three tensors or numbers, computed element by element.

    Args:
        function: the function's name under ``torch``.
        dtype: the rule of the result's dtype.
        derivatives: one for each operand, None for one without a gradient; none if the result has no gradient.
        scalars: the names of the operands that may be numbers.
        further: the names of further arguments that are numbers.
        overlapping: whether it works in place if several elements share memory.
        contiguous: whether the result is contiguous in memory, whatever the operands are.
    """

    def __init__(
        self,
        function: str,
        dtype: DTypeRule,
        *derivatives: Derivative | None,
        scalars: str = "",
        further: Sequence[str] = (),
        overlapping: bool = False,
        contiguous: bool = False,
    ) -> None:
        self._function = function
        ELEMENTWISE.add(function)
        self._dtype = dtype
        self._derivatives = derivatives
        self._scalars = scalars
        self._further = tuple(further)
        self._overlapping = overlapping
        self._contiguous = contiguous
        self._ops: dict[tuple[bool, ...], Op] = {}
        """One operation for each choice of which operands are tensors."""
        self._of_types: dict[tuple[type, ...], tuple[Op, tuple[bool, ...], bool]] = {}
        """The operation, which operands are tensors, and whether all are, by the operands' types."""

    def __call__(self, *operands: Any, further: tuple[Number, ...] = (), static: Any = ()) -> Tensor:
        """Queue the function; return its result.

        Args:
            operands: tensors and numbers, at least one of them a tensor.
            further: the values of the further arguments.
            static: pairs of the name and the value of arguments that are no numbers.
        """
        op, tensors, numbers = self.prepared(operands, further)
        return op(tensors, numbers, static)

    def in_place(self, *operands: Any, further: tuple[Number, ...] = (), static: Any = ()) -> Tensor:
        """Queue the function in place of the first operand; return that.

        Raises:
            RuntimeError: elements of that operand share memory, or the result does not fit there.
        """
        if not self._overlapping:
            check_written(operands[0].meta)
        op, tensors, numbers = self.prepared(operands, further)
        return op.in_place(tensors, numbers, static)

    def prepared(self, operands: tuple[Any, ...], further: tuple[Any, ...]) -> tuple[Op, Any, tuple[Any, ...]]:
        """Return the operation for these operands, the tensors among them, and the numbers with further ones.

        Raises:
            TypeError: an operand is neither a tensor nor a number, or one is no tensor that has to be one.
        """
        types = tuple(map(type, operands))
        found = self._of_types.get(types)
        if found is None:
            operands = plain(operands)
            types = tuple(map(type, operands))
            self._check(operands)
            pattern = tuple([isinstance(each, Tensor) for each in operands])
            if pattern not in self._ops:
                self._ops[pattern] = self._op(pattern)
            if len(self._of_types) >= MOST_TYPES:
                self._of_types.clear()
            found = self._of_types[types] = self._ops[pattern], pattern, all(pattern)
        op, pattern, only_tensors = found
        if only_tensors:
            return op, operands, further
        tensors = tuple([each for each, is_tensor in zip(operands, pattern, strict=True) if is_tensor])
        numbers = tuple([each for each, is_tensor in zip(operands, pattern, strict=True) if not is_tensor])
        return op, tensors, numbers + further

    def _check(self, operands: tuple[Any, ...]) -> None:
        for place, each in enumerate(operands):
            fits = isinstance(each, OPERAND if NAMES[place] in self._scalars else Tensor)
            if not fits or not any(isinstance(other, Tensor) for other in operands):
                name = self._function.rpartition(".")[2]
                raise TypeError(f"{name}(): argument {place + 1} must be Tensor, not {type(each).__name__}")

    def _op(self, pattern: tuple[bool, ...]) -> Op:
        """Return the operation for operands of which some are numbers."""
        tensors, numbers = self._places(pattern)
        many = len(numbers)

        def rule(metas: Sequence[Meta], values: tuple[Any, ...], static: Any) -> Meta:
            further = dict(zip(self._further, values[many:], strict=True)) | dict(static)
            meta = pointwise_meta(metas, self._dtype(metas, values[:many], further))
            return Meta(meta.shape, meta.dtype) if self._contiguous else meta

        def arguments(_tensors: int, _numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
            holes = tuple(
                T(tensors[name]) if name in tensors else S(numbers[name]) for name in NAMES[: len(pattern)]
            )
            return holes, {name: S(many + place) for place, name in enumerate(self._further)} | dict(static)

        wanted = [self._derivatives[place] for place in range(len(self._derivatives)) if pattern[place]]
        if not any(wanted):
            return Op(self._function, rule, arguments=arguments)
        names = {name for each in wanted if each is not None for name in _parameters(each)}
        saves = [place for name, place in tensors.items() if name in names]
        backward = self._backward(pattern, wanted)
        return Op(self._function, rule, backward, saves, [0] if "out" in names else [], arguments)

    def _backward(
        self, pattern: tuple[bool, ...], derivatives: Sequence[Derivative | None]
    ) -> Callable[[Node, Any], list[Any]]:
        calls = [
            None if each is None else (each, [self._getter(name, pattern) for name in _parameters(each)])
            for each in derivatives
        ]

        def backward(node: Node, grad: Any) -> list[Any]:
            return [
                call[0](grad, *[getter(node) for getter in call[1]])
                if call is not None and node.needs(place)
                else None
                for place, call in enumerate(calls)
            ]

        return backward

    def _getter(self, name: str, pattern: tuple[bool, ...]) -> Callable[[Node], Any]:
        """Return how a derivative's parameter is read from a node."""
        tensors, numbers = self._places(pattern)
        if name == "out":
            return lambda node: node.result()
        if name in tensors:
            place = tensors[name]
            return lambda node: node[place]
        if name in numbers or name in self._further:
            at = numbers[name] if name in numbers else len(numbers) + self._further.index(name)
            return lambda node: node.numbers[at]
        return lambda node: dict(node.static)[name]

    def _places(self, pattern: tuple[bool, ...]) -> tuple[dict[str, int], dict[str, int]]:
        """Return the place of each operand among the tensors, or among the numbers."""
        named = list(zip(NAMES, pattern, strict=False))
        tensors = [name for name, is_tensor in named if is_tensor]
        numbers = [name for name, is_tensor in named if not is_tensor]
        return {name: place for place, name in enumerate(tensors)}, {
            name: place for place, name in enumerate(numbers)
        }


def _parameters(derivative: Derivative) -> list[str]:
    return list(signature(derivative).parameters)[1:]


Call = tuple[Elementwise, tuple[Any, ...], tuple[Number, ...], tuple[tuple[str, Any], ...]]
"""A function of elements with what it is given: operands, further arguments and static ones."""


def elementwise(plan: Callable[..., Call]) -> Callable[..., Call]:
    """Make a function that plans a call a method of tensors, and one in place."""
    add_methods(plan.__name__, plan)
    return plan


def add_methods(name: str, plan: Callable[..., Call], in_place: bool = True) -> None:
    """Make what plans a call a method of tensors of some name; with an underscore, one in place."""
    straight: dict[tuple[type, ...], Op] = {}
    """The operation of tensors alone, by their types: then what is planned depends on nothing else."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        if not kwargs and (known := straight.get(tuple(map(type, args)))) is not None:
            return known(args)
        function, operands, further, static = plan(*args, **kwargs)
        op, tensors, numbers = function.prepared(operands, further)
        if len(tensors) == len(args) and all(map(is_, tensors, args)) and not (kwargs or numbers or static):
            straight[tuple(map(type, args))] = op
        return op(tensors, numbers, static)

    def call_in_place(*args: Any, **kwargs: Any) -> Tensor:
        function, operands, further, static = plan(*args, **kwargs)
        return function.in_place(*operands, further=further, static=static)

    for made, its_name in ((call, name), (call_in_place, f"{name}_"))[: 1 + in_place]:
        made.__name__ = made.__qualname__ = its_name
        made.__doc__ = plan.__doc__ or f"See ``torch.{its_name}``."
        made.__wrapped__ = plan  # type: ignore[attr-defined]
        methods[its_name] = made


# Rules of dtypes


def result_dtype(metas: Sequence[Meta], numbers: tuple[Any, ...]) -> DType:
    """Return the dtype to which tensors and numbers are promoted."""
    if metas and not numbers and all(each.dtype is metas[0].dtype for each in metas):
        return metas[0].dtype
    return result_type(
        [each.dtype for each in metas if each.shape],
        [each.dtype for each in metas if not each.shape],
        [of_scalar(each) for each in numbers],
    )


def promoted(metas: Sequence[Meta], numbers: tuple[Any, ...], further: Mapping[str, Any]) -> DType:
    """The rule of a function whose result has the operands' promoted dtype."""
    return result_dtype(metas, numbers)


def floating(metas: Sequence[Meta], numbers: tuple[Any, ...], further: Mapping[str, Any]) -> DType:
    """The rule of a function that makes floating point numbers of integers."""
    dtype = result_dtype(metas, numbers)
    return dtype if dtype.kind >= Kind.FLOAT else DEFAULT


def boolean(metas: Sequence[Meta], numbers: tuple[Any, ...], further: Mapping[str, Any]) -> DType:
    """The rule of a function that tells whether something holds."""
    return bool_


def kept(metas: Sequence[Meta], numbers: tuple[Any, ...], further: Mapping[str, Any]) -> DType:
    """The rule of a function whose result has the first operand's dtype."""
    return metas[0].dtype


def refusing(
    kinds: Sequence[Kind], text: str, rule: DTypeRule = promoted, error: type[Exception] = RuntimeError
) -> DTypeRule:
    """Return a rule that raises an error if the operands' promoted dtype is of some kind.

    Args:
        kinds: the kinds that raise.
        text: the error's text, in which ``{}`` stands for the dtype.
        rule: the rule for other kinds.
        error: the error's class.
    """

    def checked(metas: Sequence[Meta], numbers: tuple[Any, ...], further: Mapping[str, Any]) -> DType:
        dtype = result_dtype(metas, numbers)
        if dtype.kind in kinds:
            raise error(text.format(dtype.scalar_name))
        return rule(metas, numbers, further)

    return checked


NO_BOOL = (Kind.BOOL,)
NO_INT = (Kind.BOOL, Kind.INT)
NO_FLOAT = (Kind.FLOAT, Kind.COMPLEX)


def lacking(kernel: str, kinds: Sequence[Kind], rule: DTypeRule = promoted) -> DTypeRule:
    """Return a rule that raises an error if torch's kernel of some name has no code for a kind of dtype."""
    return refusing(kinds, f"\"{kernel}\" not implemented for '{{}}'", rule, NotImplementedError)


# Derivatives that several functions share


def flat(grad: Any) -> Any:
    """The gradient of a function that is constant in steps: zeros."""
    return grad._home.zeros_like(grad)


def same(grad: Any) -> Any:
    """The gradient of an operand that is added."""
    return grad


def chosen(condition: Any, x: Any, y: Any) -> Tensor:
    """Return ``torch.where(condition, x, y)``."""
    return _where(condition, x, y)


def _where_dtype(metas: Sequence[Meta], numbers: tuple[Any, ...], further: Mapping[str, Any]) -> DType:
    if metas[0].dtype not in (bool_, uint8):
        name = metas[0].dtype.scalar_name
        raise RuntimeError(f"where expected condition to be a boolean tensor, but got a tensor with dtype {name}")
    return result_dtype(metas[1:], numbers)


_where: Elementwise = Elementwise(
    "where",
    _where_dtype,
    None,
    lambda grad, x: _where(x, grad, 0),
    lambda grad, x: _where(x, 0, grad),
    scalars="yz",
)
