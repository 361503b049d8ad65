"""The commands that the laptop sends to the tensor workers, and their encoding, sans-IO.

A **form** is a call with holes: a function of torch, its arguments, and where tensors and numbers go. A **command**
is a form with its tensors. Its results take the next ids, so that no command names them; a tensor is named by how
far back it was made if that is not long ago, else by its id. The commands of a loop are therefore the same in every
round. Both sides number the different commands as they come, and a sequence of numbers that was there before goes
as its distance and its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgpack

from loom.errors import ProtocolMismatch
from loom.tensors.layouts import DType, dtype_named, plain
from loom.tensors.sending.repeats import Repeats, whole

NEAR = 4096
"""Ids back to which a tensor is named by its distance."""

STAYS = (8, 512)
"""A tensor that was used so often is named by its id already from a nearer distance on: it is a weight."""

PASSING = 64
"""Ids back to which uses of a tensor are not counted: most are results that are used once and freed."""

MOST_COMMANDS = 65_536
"""Different commands that are numbered; then both sides begin anew."""

MOST_FORMS = 8192
"""Forms after which they begin anew."""

MOST_VALUES = 4
"""Different numbers with which a command is numbered; then its numbers go along each time."""


class T(NamedTuple):
    """The hole of a tensor in a form."""

    place: int


class S(NamedTuple):
    """The hole of a number in a form."""

    place: int


class Form(NamedTuple):
    """A call with holes."""

    function: str
    """Its name under ``torch``, or one of the backend's own, such as ``.free``."""
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    tensors: int = 0
    """The number of tensors it takes."""
    numbers: int = 0
    """The number of its numbers, which may differ each time."""
    outs: int = 1
    """The number of its results; of an operation in place, 0."""
    learns: bool = False
    """True if the workers tell the layouts of its results."""

    @property
    def name(self) -> str:
        """The name of the function in errors."""
        return str(self.args[0] if self.function in (".flat", ".made", ".structure") else self.function.lstrip("."))


class Constant(NamedTuple):
    """A constant of torch by its name, such as ``channels_last``."""

    name: str


class Numbered:
    """A form in an encoder's hands, for commands with numbers of these types."""

    __slots__ = ("form", "generation", "number", "outs", "packable")

    def __init__(self, form: Form) -> None:
        self.form = form
        self.outs = form.outs
        self.packable = _packable(form)
        try:
            msgpack.packb(self.packable)
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"{form.name}(): an argument does not travel to the workers: {error}") from None
        self.generation = -1
        """The numbering in which it has its number."""
        self.number = 0


class Failure(NamedTuple):
    """A worker's report of a command that failed, or of one that needs its result."""

    batch: int
    place: int
    """The command's place in its batch; -1 if it is of no command."""
    like: str
    """The name of the exception's built-in class."""
    text: str


FREE = Form(".free", (), tensors=1, outs=0)

Command = tuple[Any, ...]
"""The number of a form, its tensors, and its numbers as a tuple if it is numbered with them."""


class CommandBatch(NamedTuple):
    """Commands as they travel."""

    first: int
    """The id of the first result."""
    anew: bool
    """True if the numbers begin anew."""
    forms: list[Any]
    commands: list[Command]
    sequence: list[int]
    """Numbers of commands; ``-distance, length`` is a copy."""
    values: list[Any]
    """The numbers that go along."""


class Decoded(NamedTuple):
    """The content of a batch."""

    first: int
    """The id of the first result."""
    anew: bool
    """True if forms and commands are numbered anew."""
    sequence: list[int]
    """The numbers of the commands."""
    values: Iterator[Any]
    """The numbers that go along."""


class CommandEncoder:
    """Numbers commands, and encodes them. Not thread-safe."""

    def __init__(self) -> None:
        self.next_id = 1
        """The id of the next result."""
        self._forms: dict[tuple[Form, Any], Numbered] = {}
        self._generation = 0
        self._many_forms = 0
        self._new_forms: list[Any] = []
        self._numbers: dict[Command, int] = {}
        self._new_commands: list[Command] = []
        self._seen: dict[Command, int] = {}
        """With how many different numbers a command was seen."""
        self._uses: dict[int, int] = {}
        """The number of uses of each unfreed tensor from further than `PASSING`."""
        self._frees: dict[int, int] = {}
        """The numbers of the commands that free a tensor, by its distance, up to `PASSING`."""
        self._sequence: list[int] = []
        self._values: list[Any] = []
        self._first = 1
        self._anew = False
        self._past = Repeats()

    def __len__(self) -> int:
        return len(self._sequence)

    def form(self, form: Form, types: tuple[type, ...] = ()) -> Numbered:
        """Return a form for `put`, with numbers of these types. It is good for as long as this encoder.

        Raises:
            TypeError: an argument is nothing that travels.
        """
        key = (hashable(form), types)
        numbered = self._forms.get(key)
        if numbered is None:
            numbered = self._forms[key] = Numbered(form._replace(args=plain(form.args), kwargs=plain(form.kwargs)))
        return numbered

    def put(self, form: Numbered, tensors: Sequence[int], numbers: tuple[Any, ...] = ()) -> int:
        """Add a command; return the id of its first result."""
        if form.generation != self._generation:
            self._number_form(form)
        now = self.next_id
        command: Command
        if len(tensors) == 1:
            (one,) = tensors
            command = (form.number, one - now if now - one <= PASSING else self._named(one, now))
        elif len(tensors) == 2:
            one, other = tensors
            command = (
                form.number,
                one - now if now - one <= PASSING else self._named(one, now),
                other - now if now - other <= PASSING else self._named(other, now),
            )
        else:
            command = (
                form.number,
                *[each - now if now - each <= PASSING else self._named(each, now) for each in tensors],
            )
        if numbers:
            command = self._with_numbers(command, numbers)
        number = self._numbers.get(command)
        if number is None:
            number = self._number(command)
        self._sequence.append(number)
        self.next_id = now + form.outs
        return now

    def _named(self, ident: int, now: int) -> int:
        used, distance = self._uses.get(ident, 0), now - ident
        if used <= STAYS[0]:
            self._uses[ident] = used = used + 1
        return ident if distance > NEAR or (used > STAYS[0] and distance > STAYS[1]) else -distance

    def free(self, form: Numbered, ident: int) -> None:
        """Add the command that frees a tensor."""
        distance = self.next_id - ident
        number = self._frees.get(distance)
        if number is not None:
            self._sequence.append(number)
        else:
            self.put(form, (ident,))
            if distance <= PASSING:
                self._frees[distance] = self._sequence[-1]
        self._uses.pop(ident, None)

    def take(self) -> bytes:
        """Return what was added since the last call."""
        sequence = self._past.shorten(self._sequence)
        batch = CommandBatch(self._first, self._anew, self._new_forms, self._new_commands, sequence, self._values)
        packed: bytes = msgpack.packb(batch, default=_packable)
        self._first, self._anew = self.next_id, False
        self._new_forms, self._new_commands, self._sequence, self._values = [], [], [], []
        if len(self._numbers) > MOST_COMMANDS or self._many_forms > MOST_FORMS:
            self._begin_anew()
        return packed

    def restart(self) -> None:
        """Encode for another decoder from here on, which begins with ``next_id``; what was added is left out."""
        self._new_forms, self._new_commands, self._sequence, self._values = [], [], [], []
        self._first = self.next_id
        self._begin_anew()

    def _with_numbers(self, command: Command, numbers: tuple[Any, ...]) -> Command:
        whole = (*command, numbers)
        # 0.0 equals -0.0, and is another number.
        if whole in self._numbers and 0.0 not in numbers:
            return whole
        seen = self._seen.get(command, 0)
        if seen < MOST_VALUES and 0.0 not in numbers:
            self._seen[command] = seen + 1
            return whole
        self._values.extend(numbers)
        return command

    def _number_form(self, form: Numbered) -> None:
        form.number, form.generation = self._many_forms, self._generation
        self._many_forms += 1
        self._new_forms.append(form.packable)

    def _number(self, command: Command) -> int:
        number = self._numbers[command] = len(self._numbers)
        self._new_commands.append(command)
        return number

    def _begin_anew(self) -> None:
        self._anew = True
        self._generation += 1
        self._forms.clear()
        self._many_forms = 0
        self._numbers.clear()
        self._frees.clear()
        self._seen.clear()
        self._past = Repeats()


class CommandDecoder:
    """Decodes what an `CommandEncoder` has encoded.

    Args:
        first: the id of the first result.
    """

    def __init__(self, first: int = 1) -> None:
        self.forms: list[Form] = []
        self.commands: list[Command] = []
        self._outs: list[int] = []
        """The number of each command's results."""
        self._past: list[int] = []
        self._next = first

    def take(self, packed: bytes) -> Decoded:
        """Return what a batch says.

        Raises:
            ProtocolMismatch: a batch is missing, or this is none.
        """
        try:
            batch = CommandBatch(*msgpack.unpackb(packed, use_list=False, ext_hook=_unpacked))
            if batch.first != self._next:
                raise ValueError(f"it begins with id {batch.first}, not {self._next}")
            if batch.anew:
                self.forms.clear()
                self.commands.clear()
                self._outs.clear()
                self._past.clear()
            self.forms.extend(Form(*each) for each in batch.forms)
            self.commands.extend(batch.commands)
            self._outs.extend(self.forms[each[0]].outs for each in batch.commands)
            sequence = whole(self._past, batch.sequence)
            self._next += sum(map(self._outs.__getitem__, sequence))
        except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
            raise ProtocolMismatch(f"these are no commands for tensors: {error}") from error
        return Decoded(batch.first, batch.anew, sequence, iter(batch.values))


def check_number(number: object) -> None:
    """Check that a number can travel.

    Raises:
        OverflowError: it has more than 64 bits, in torch's words.
        TypeError: it is none.
    """
    if isinstance(number, int):
        if not -(1 << 63) <= number < 1 << 64:
            raise OverflowError(
                "int too big to convert" if number > 0 else "can't convert negative int to unsigned"
            )
    elif not isinstance(number, (float, complex)):
        raise TypeError(f"a number is needed, not {type(number).__name__}")


_TENSOR, _NUMBER, _DTYPE, _SLICE, _ELLIPSIS, _LIST, _COMPLEX, _CONSTANT = range(1, 9)


def hashable(value: Any) -> Any:
    """Return a key that tells apart what is equal and not the same: 1, 1.0 and True, a slice."""
    match value:
        case T() | S() | Constant():
            return (type(value).__name__, *value)  # as tuples they are equal
        case tuple() | list():
            return (type(value).__name__, *map(hashable, value))
        case slice():
            return ("slice", hashable(value.start), hashable(value.stop), hashable(value.step))
        case float():
            return (float, value.hex())
        case complex():
            return (complex, value.real.hex(), value.imag.hex())
    return (type(value), value)


def _packable(value: Any) -> Any:
    match value:
        case T(place):
            return msgpack.ExtType(_TENSOR, bytes([place]) if place < 256 else place.to_bytes(4, "big"))
        case S(place):
            return msgpack.ExtType(_NUMBER, bytes([place]))
        case DType():
            return msgpack.ExtType(_DTYPE, value.name.encode())
        case Constant():
            return msgpack.ExtType(_CONSTANT, value.name.encode())
        case slice():
            parts = [_packable(each) for each in (value.start, value.stop, value.step)]
            return msgpack.ExtType(_SLICE, msgpack.packb(parts))
        case list():
            return msgpack.ExtType(_LIST, msgpack.packb([_packable(each) for each in value]))
        case complex():
            return msgpack.ExtType(_COMPLEX, msgpack.packb([value.real, value.imag]))
        case tuple():
            return [_packable(each) for each in value]
    if value is ...:
        return msgpack.ExtType(_ELLIPSIS, b"")
    return value


def _unpacked(code: int, data: bytes) -> Any:
    match code:
        case 1:
            return T(int.from_bytes(data, "big"))
        case 2:
            return S(data[0])
        case 3:
            return dtype_named(data.decode())
        case 4:
            return slice(*msgpack.unpackb(data, ext_hook=_unpacked))
        case 5:
            return ...
        case 6:
            return list(msgpack.unpackb(data, use_list=False, ext_hook=_unpacked))
        case 7:
            return complex(*msgpack.unpackb(data))
        case 8:
            return Constant(data.decode())
    raise ValueError(f"an unknown kind of value, {code}")
