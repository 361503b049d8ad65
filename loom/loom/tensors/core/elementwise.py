"""`Elementwise`, a function that is computed element by element, and the rules of which dtype it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

from loom.tensors.layouts import (
    DEFAULT,
    DType,
    DtypeKind,
    Meta,
    bool_,
    check_written,
    of_scalar,
    plain,
    pointwise_meta,
    result_type,
)
from loom.tensors.op import ELEMENTWISE, Op, methods
from loom.tensors.sending.encoding import S, T
from loom.tensors.tensor import Tensor

Number = bool | int | float | complex

OPERAND = (Tensor, int, float, complex)
"""What arithmetic takes. Python's operators leave everything else to the other operand."""

MOST_TYPES = 64
"""Choices of the operands' types that a function remembers."""

DTypeRule = Callable[[Sequence[Meta], tuple[Any, ...], Mapping[str, Any]], DType]
"""The result's dtype, of the tensors' metas, the numbers among the operands, and the further arguments by name."""


class Elementwise:
    """A function of up to three tensors or numbers, computed element by element.

    Args:
        function: the function's name under ``torch``.
        dtype: the rule of the result's dtype.
        scalars: the places of the operands that may be numbers.
        further: the names of further arguments that are numbers.
        overlapping: whether it works in place if several elements share memory.
        contiguous: whether the result is contiguous in memory, whatever the operands are.
    """

    def __init__(
        self,
        function: str,
        dtype: DTypeRule,
        scalars: Sequence[int] = (),
        further: Sequence[str] = (),
        overlapping: bool = False,
        contiguous: bool = False,
    ) -> None:
        self._function = function
        ELEMENTWISE.add(function)
        self._dtype = dtype
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
            fits = isinstance(each, OPERAND if place in self._scalars else Tensor)
            if not fits or not any(isinstance(other, Tensor) for other in operands):
                name = self._function.rpartition(".")[2]
                raise TypeError(f"{name}(): argument {place + 1} must be Tensor, not {type(each).__name__}")

    def _op(self, pattern: tuple[bool, ...]) -> Op:
        """Return the operation for operands of which some are numbers."""
        many = pattern.count(False)

        def rule(metas: Sequence[Meta], values: tuple[Any, ...], static: Any) -> Meta:
            further = dict(zip(self._further, values[many:], strict=True)) | dict(static)
            meta = pointwise_meta(metas, self._dtype(metas, values[:many], further))
            return Meta(meta.shape, meta.dtype) if self._contiguous else meta

        def arguments(_tensors: int, _numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
            tensors, numbers = iter(range(len(pattern))), iter(range(len(pattern)))
            holes = tuple([T(next(tensors)) if is_tensor else S(next(numbers)) for is_tensor in pattern])
            return holes, {name: S(many + place) for place, name in enumerate(self._further)} | dict(static)

        return Op(self._function, rule, arguments)


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


def add_table(table: Mapping[str, Elementwise], operands: int, in_place: bool = True) -> None:
    """Make functions of so many operands, and of nothing else, methods of tensors."""

    def plan(function: Elementwise) -> Callable[..., Call]:
        if operands == 1:
            return lambda self: (function, (self,), (), ())
        return lambda self, other: (function, (self, other), (), ())

    for name, function in table.items():
        add_methods(name, plan(function), in_place)


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
    return dtype if dtype.kind >= DtypeKind.FLOAT else DEFAULT


def boolean(metas: Sequence[Meta], numbers: tuple[Any, ...], further: Mapping[str, Any]) -> DType:
    """The rule of a function that tells whether something holds."""
    return bool_


def kept(metas: Sequence[Meta], numbers: tuple[Any, ...], further: Mapping[str, Any]) -> DType:
    """The rule of a function whose result has the first operand's dtype."""
    return metas[0].dtype


def refusing(
    kinds: Sequence[DtypeKind], text: str, rule: DTypeRule = promoted, error: type[Exception] = RuntimeError
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


NO_BOOL = (DtypeKind.BOOL,)
NO_INT = (DtypeKind.BOOL, DtypeKind.INT)
NO_FLOAT = (DtypeKind.FLOAT, DtypeKind.COMPLEX)


def lacking(kernel: str, kinds: Sequence[DtypeKind], rule: DTypeRule = promoted) -> DTypeRule:
    """Return a rule that raises an error if torch's kernel of some name has no code for a kind of dtype."""
    return refusing(kinds, f"\"{kernel}\" not implemented for '{{}}'", rule, NotImplementedError)
