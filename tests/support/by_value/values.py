"""Values whose classes travel by value, each with a function that looks at it on the other side."""

from __future__ import annotations

import abc
import collections
import contextvars
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import operator
import pathlib
import re
import types
import typing
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypedDict, TypeVar

from tests.support.by_value import baskets, trees

T = TypeVar("T")


class Color(enum.Enum):
    RED = 1
    BLUE = "b"
    CRIMSON = 1


class Permission(enum.Flag):
    R = 1
    W = 2
    X = 4
    RW = 3


class IntPermission(enum.IntFlag):
    R = 1
    W = 2
    RW = 3


class Number(enum.IntEnum):
    ONE = 1


class Text(str, enum.Enum):
    A = "a"


Made = enum.Enum("Made", ["P", "Q"])


class Sentinel(enum.Enum):
    """Its values are equal to none of their copies."""

    NOTHING = object()
    LENGTH = (len, object())
    NUMBER = 3


class Planet(enum.Enum):
    EARTH = (5, 6)
    MARS = (1, 3)

    def __init__(self, mass: int, radius: int) -> None:
        self.mass = mass
        self.radius = radius

    @property
    def total(self) -> int:
        return self.mass + self.radius


class Auto(enum.Enum):
    X = enum.auto()
    Y = enum.auto()

    @classmethod
    def _missing_(cls, value: object) -> Auto:
        return cls.Y


Pair = collections.namedtuple("Pair", ["left", "right"])


class Named(NamedTuple):
    x: int
    y: str = "d"

    def both(self) -> str:
        return f"{self.x}{self.y}"


class Typed(TypedDict):
    a: int


@dataclasses.dataclass
class Data:
    x: int
    y: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Frozen:
    x: int
    y: str = "q"


@dataclasses.dataclass(slots=True)
class Slim:
    z: int = 3


@dataclasses.dataclass(kw_only=True)
class Keyword:
    a: int


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a = 1


class SlottedChild(Slotted):
    __slots__ = ("__weakref__", "c")

    def __init__(self) -> None:
        super().__init__()
        self.c = 3


class SlottedWithDict(Slotted):
    def __init__(self) -> None:
        super().__init__()
        self.d = 4


class PrivateSlot:
    __slots__ = ("__x",)

    def __init__(self) -> None:
        self.__x = 5

    def value(self) -> int:
        return self.__x


class OneSlot:
    __slots__ = "only"

    def __init__(self) -> None:
        self.only = 7


class OnePrivateSlot:
    __slots__ = "__only"

    def __init__(self) -> None:
        self.__only = 8

    def value(self) -> int:
        return self.__only


class Box(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value


class IntBox(Box[int]):
    pass


@typing.runtime_checkable
class Sized(Protocol):
    def size(self) -> int: ...


class Sizes(Sized):
    def size(self) -> int:
        return 1


class Meta(type):
    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], **options: Any) -> Meta:
        cls = super().__new__(mcs, name, bases, body)
        cls.made = True  # type: ignore[attr-defined]
        return cls

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **options: Any) -> None:
        super().__init__(name, bases, body)


class WithMeta(metaclass=Meta, extra=3):
    pass


class Abstract(abc.ABC):
    @abc.abstractmethod
    def value(self) -> int: ...


class Concrete(Abstract):
    def value(self) -> int:
        return 2


Abstract.register(int)


class Attribute:
    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else getattr(instance, self.name)

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance, self.name, value)


class WithAttribute:
    value = Attribute()

    def __init__(self) -> None:
        self.value = 9


class Cached:
    @functools.cached_property
    def once(self) -> int:
        return 5

    @functools.lru_cache(maxsize=3)  # noqa: B019
    def kept(self, x: int) -> int:
        return x + 1

    @functools.singledispatchmethod
    def kind(self, x: Any) -> str:
        return "object"

    @kind.register
    def _(self, x: int) -> str:
        return "int"

    @staticmethod
    def static() -> int:
        return 1

    @classmethod
    def name(cls) -> str:
        return cls.__qualname__

    @property
    def read(self) -> int:
        return 6


@functools.cache
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@functools.singledispatch
def kind_of(x: Any) -> str:
    return "object"


@kind_of.register
def _(x: int) -> str:
    return "int"


def factorial(n: int) -> int:
    return 1 if n < 2 else n * factorial(n - 1)


def even(n: int) -> bool:
    return True if n == 0 else odd(n - 1)


def odd(n: int) -> bool:
    return False if n == 0 else even(n - 1)


class Node:
    def __init__(self) -> None:
        self.me = self
        self.weak = weakref.ref(self)

    def clone(self) -> Node:
        return Node()


class Base:
    def name(self) -> str:
        return "base"


class Child(Base):
    def name(self) -> str:
        return "child of " + super().name()


class Outer:
    class Inner:
        def outer(self) -> str:
            return Outer.__qualname__

    @dataclasses.dataclass
    class Data:
        v: int = 1


def decorated_by(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@decorated_by
def decorated(x: int) -> int:
    return x


async def items() -> AsyncIterator[int]:
    yield 1


async def coroutine() -> int:
    return 1


def generator() -> Iterator[int]:
    yield 1


def adds(n: int) -> Callable[[int], int]:
    def add(x: int) -> int:
        return x + n

    return add


VARIABLE = contextvars.ContextVar("VARIABLE", default=3)
BARE = contextvars.ContextVar[int]("BARE")


def variable() -> int:
    token = VARIABLE.set(VARIABLE.get() + 1)
    try:
        return VARIABLE.get()
    finally:
        VARIABLE.reset(token)


class Known:
    known: typing.ClassVar[list[str]] = []

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__()
        Known.known.append(cls.__name__)


class KnownChild(Known, option=1):
    pass


class NeedsKeyword(Exception):
    def __init__(self, *, number: int) -> None:
        super().__init__(f"number {number}")
        self.number = number


class Dictionary(dict[str, int]):
    def __init__(self) -> None:
        super().__init__(a=1)
        self.q = 1


class Numbers(list[int]):
    pass


class Integer(int):
    pass


class Weak:
    def __init__(self) -> None:
        self.held = Base()
        self.reference = weakref.ref(self.held)
        self.by_key = weakref.WeakKeyDictionary({self.held: 1})
        self.by_value = weakref.WeakValueDictionary({"a": self.held})
        self.all = weakref.WeakSet([self.held])


class Unnamed:
    pass


Unnamed.__module__ = None  # type: ignore[assignment]

UserId = typing.NewType("UserId", int)
Parameters = typing.ParamSpec("Parameters")


def annotated(x: "Any", *rest: T, **more: "Data") -> typing.Optional[Data]:  # noqa: UP037, UP045
    return None


def _same(value: Any) -> str:
    return type(value).__qualname__


VALUES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "enum": (Color.RED, lambda v: (v.name, v.value, type(v).CRIMSON is v, len(type(v)))),
    "enum class": (Color, lambda v: [member.name for member in v]),
    "flag": (Permission.R, lambda v: (v.value, v in type(v).RW)),
    "flags": (Permission.R | Permission.X, lambda v: (v.value, (v & type(v).RW).name)),
    "no flag": (Permission(0), lambda v: v.value),
    "composed flag": (Permission.RW, lambda v: v.name),
    "int flags": (IntPermission.R | IntPermission.W, lambda v: (int(v), v.name)),
    "unknown int flag": (IntPermission(8), int),
    "int enum": (Number.ONE, lambda v: v + 1),
    "text enum": (Text.A, lambda v: v + "b"),
    "functional enum": (Made.P, lambda v: v.name),
    "enum with a constructor": (Planet.MARS, lambda v: (v.mass, v.total)),
    "automatic enum": (Auto.X, lambda v: (v.value, type(v)("unknown").name)),
    "sentinels": (tuple(Sentinel), lambda v: [type(one)[one.name] is one for one in v]),
    "number among sentinels": ([Sentinel.NUMBER, Sentinel.NOTHING], lambda v: (v[0].value, v[1].name)),
    "enums as keys": ({Color.RED: {Permission.W: Number.ONE}}, len),
    "set of enums": (frozenset([Color.RED]), len),
    "named tuple": (Pair(1, 2), lambda v: (v.left, v._replace(left=3).left)),
    "typed named tuple": (Named(1), lambda v: v.both()),
    "typed dict class": (Typed, lambda v: v(a=1)),
    "data class": (Data(1), lambda v: (v, v.y, _same(v) == "Data")[1:]),
    "frozen data class with slots": (
        Frozen(1),
        lambda v: (v < type(v)(2), hash(v) == hash(type(v)(1)), hasattr(v, "__dict__")),
    ),
    "data class with slots": (Slim(), lambda v: (v.z, hasattr(v, "__dict__"))),
    "keyword data class": (Keyword(a=1), lambda v: dataclasses.asdict(v)),
    "slots": (Slotted(), lambda v: (v.a, hasattr(v, "b"), hasattr(v, "__dict__"))),
    "inherited slots": (SlottedChild(), lambda v: (v.a, v.c, weakref.ref(v)() is v)),
    "slots and attributes": (SlottedWithDict(), lambda v: (v.a, v.d)),
    "private slot": (PrivateSlot(), lambda v: v.value()),
    "slots as a text": (OneSlot(), lambda v: v.only),
    "private slot as a text": (OnePrivateSlot(), lambda v: v.value()),
    "generic": (Box(1), lambda v: v.value),
    "generic subclass": (IntBox(2), lambda v: v.value),
    "generic alias": (Box[int], lambda v: v(4).value),
    "protocol": (Sized, lambda v: isinstance(3, v)),
    "class of a protocol": (Sizes(), lambda v: v.size()),
    "metaclass": (WithMeta, lambda v: (v.made, type(v).__name__)),
    "object of a metaclass": (WithMeta(), lambda v: type(v).made),
    "abstract class": (Abstract, lambda v: (issubclass(int, v), sorted(v.__abstractmethods__))),
    "concrete class": (Concrete(), lambda v: v.value()),
    "descriptor": (WithAttribute(), lambda v: v.value),
    "methods": (Cached(), lambda v: (v.once, v.kept(1), v.kind(1), v.kind("a"), v.static(), v.name(), v.read)),
    "cached function": (fibonacci, lambda v: (v(30), v.cache_parameters()["maxsize"], v.__name__)),
    "single dispatch": (kind_of, lambda v: (v(1), v("a"))),
    "recursion": (factorial, lambda v: v(5)),
    "recursion of two": (even, lambda v: v(10)),
    "ring": (Node(), lambda v: (v.me is v, v.weak() is v, type(v.clone()) is type(v))),
    "super": (Child(), lambda v: v.name()),
    "nested class": (Outer.Inner(), lambda v: (v.outer(), type(v).__qualname__)),
    "nested data class": (Outer.Data(), lambda v: v.v),
    "class with nested ones": (Outer, lambda v: v.Inner().outer()),
    "decorated": (decorated, lambda v: (v(1), v.__name__)),
    "async generator function": (items, lambda v: v.__name__),
    "coroutine function": (coroutine, lambda v: v.__name__),
    "generator function": (generator, lambda v: list(v())),
    "closure": (adds(3), lambda v: v(4)),
    "lambda in a dict": ({"f": lambda x: x + 1}, lambda v: v["f"](1)),
    "partial": (functools.partial(factorial, 3), lambda v: v()),
    "partial of a class": (functools.partial(Child), lambda v: v().name()),
    "bound method": (Child().name, lambda v: v()),
    "class method": (Cached.name, lambda v: v()),
    "function of a class": (Child.name, lambda v: v.__qualname__),
    "function with a context variable": (variable, lambda v: v()),
    "context variable": (VARIABLE, lambda v: v.get()),
    "context variable without a default": (BARE, lambda v: v.get(0)),
    "subclass hook": (KnownChild(), lambda v: type(v).__name__),
    "exception": (NeedsKeyword(number=1), lambda v: (v.number, str(v), v.args)),
    "exceptions": ([NeedsKeyword(number=2), ValueError("x")], lambda v: (v[0].number, str(v[1]))),
    "subclass of dict": (Dictionary(), lambda v: (v["a"], v.q)),
    "subclass of list": (Numbers([1]), lambda v: v[0]),
    "subclass of int": (Integer(3), lambda v: v + 1),
    "weak references": (
        Weak(),
        lambda v: (v.reference() is v.held, len(v.by_key), v.by_value["a"] is v.held, len(v.all)),
    ),
    "class without a module": (Unnamed(), _same),
    "new type": (UserId, lambda v: v(3)),
    "type variable": (T, lambda v: v.__name__),
    "parameters": (Parameters, lambda v: v.__name__),
    "annotations": (annotated, lambda v: sorted(v.__annotations__)),
    "pattern": (re.compile("a+"), lambda v: v.match("aa").group()),
    "alias": (list[int], repr),
    "union": (int | str, repr),
    "optional": (typing.Optional[int], repr),  # noqa: UP045
    "namespace": (types.SimpleNamespace(a=Base()), lambda v: v.a.name()),
    "mapping proxy": (types.MappingProxyType({"a": 1}), lambda v: v["a"]),
    "attribute getter": (operator.attrgetter("a"), lambda v: v(types.SimpleNamespace(a=2))),
    "default dict": (collections.defaultdict(Base), lambda v: v["a"].name()),
    "deque": (collections.deque([Base()], maxlen=2), lambda v: (v[0].name(), v.maxlen)),
    "chain map": (collections.ChainMap({"a": 1}), lambda v: v["a"]),
    "counter": (collections.Counter("aa"), lambda v: v["a"]),
    "slice": (slice(1, 2), lambda v: v.stop),
    "ellipsis": ([..., NotImplemented, type(None), type(...)], repr),
    "date": (datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc), str),
    "decimal": (decimal.Decimal("1.1"), str),
    "fraction": (fractions.Fraction(1, 3), str),
    "uuid": (uuid.UUID(int=5), str),
    "path": (pathlib.PurePosixPath("/x"), str),
    "iterators": ([iter([1, 2]), iter(range(3, 5))], lambda v: (next(v[0]), next(v[1]))),
    "method of a built-in": (str.upper, lambda v: v("a")),
    "standard module": (re, lambda v: v.escape("a")),
    "project module": (baskets, lambda v: (v.fits(2), v.LIMIT, v.Basket(1).tree().apples)),
    "function of modules that import each other": (trees.picked, lambda v: (v(2), v(5))),
    "object of modules that import each other": (trees.Tree(2), lambda v: v.basket().tree().basket().apples),
    "function with a context variable of its module": (baskets.which, lambda v: v()),
}
