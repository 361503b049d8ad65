"""Values as they come over the link, in the types that handlers ask for."""

from __future__ import annotations

import enum
import math
from typing import Any, Literal, Optional, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom.threadlet.handlers import BadValue, convert, is_convertible, type_name


class Schedule(enum.Enum):
    COSINE = "cos"
    LINEAR = "lin"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Switch(enum.Enum):
    ON = True
    OFF = False


@pytest.mark.parametrize(
    ("value", "wanted", "expected"),
    [
        (3, int, 3),
        ("3", int, 3),
        (" -3 ", int, -3),
        (3.0, int, 3),
        (0.002, float, 0.002),
        ("0.002", float, 0.002),
        ("1e-4", float, 1e-4),
        (1, float, 1.0),
        ("inf", float, math.inf),
        (True, bool, True),
        (0, bool, False),
        (1, bool, True),
        ("true", bool, True),
        ("FALSE", bool, False),
        ("Yes", bool, True),
        ("no", bool, False),
        ("1", bool, True),
        ("0", bool, False),
        ("cosine", str, "cosine"),
        ("", str, ""),
        (5, str, "5"),
        ("COSINE", Schedule, Schedule.COSINE),
        ("lin", Schedule, Schedule.LINEAR),
        (Schedule.LINEAR, Schedule, Schedule.LINEAR),
        (2, Level, Level.HIGH),
        (2.0, Level, Level.HIGH),
        ("2", Level, Level.HIGH),
        ("LOW", Level, Level.LOW),
        (True, Switch, Switch.ON),
        ("False", Switch, Switch.OFF),
        (None, Optional[int], None),  # noqa: UP045 - how older programs write it
        ("none", int | None, None),
        ("null", float | None, None),
        ("3", int | None, 3),
        ("none", str | None, "none"),
        ("some", str | None, "some"),
        (3, Union[int, str], 3),  # noqa: UP007 - as above
        ("3", int | str, "3"),
        (2.5, int | float, 2.5),
        ("2.5", int | float, 2.5),
        ([1, "2"], list[int], [1, 2]),
        ("[0.9, 0.999]", list[float], [0.9, 0.999]),
        ((1, 2), list, [1, 2]),
        ("[]", list[str], []),
        ('[[1], ["2"]]', list[list[int]], [[1], [2]]),
        ("null", list[int] | None, None),
        ("adam", Literal["adam", "sgd"], "adam"),
        ("2", Literal[1, 2], 2),
        (2.0, Literal[1, 2], 2),
        ({"a": 1}, Any, {"a": 1}),
        (None, None, None),
    ],
)
def test_a_value_becomes_what_was_asked_for(value: Any, wanted: Any, expected: Any) -> None:
    converted = convert(value, wanted)

    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (3.5, int),
        ("3.5", int),
        (True, int),
        (math.inf, int),
        (math.nan, int),
        (None, int),
        ([3], int),
        ("", int),
        ("fast", float),
        ("nan", float),
        ("NaN", float),
        (True, float),
        (None, float),
        (10**400, float),
        ("maybe", bool),
        (2, bool),
        (1.0, bool),
        (None, bool),
        ([], bool),
        (None, str),
        (True, str),
        (["a"], str),
        ("cosine", Schedule),
        (None, Schedule),
        ([], Schedule),
        (True, Level),
        (1, Switch),
        ("1, 2", list[int]),
        ("[1, 2", list[int]),
        ("3", list[int]),
        ("[NaN]", list[float]),
        (3, list[int]),
        ([1, "x"], list[int]),
        ({"a": 1}, list[int]),
        ("[" * 100_000, list[int]),
        ("rmsprop", Literal["adam", "sgd"]),
        (True, Literal[1, 2]),
        ("x", int | None),
        ([], int | float),
        ("text", None),
    ],
)
def test_a_value_that_is_none_is_refused(value: Any, wanted: Any) -> None:
    with pytest.raises(BadValue) as raised:
        convert(value, wanted)

    assert type_name(wanted) in str(raised.value)
    assert repr(value)[:70] in str(raised.value)


SIMPLE = st.sampled_from([int, float, bool, str, Schedule, Level, Switch, Literal["a", 1], type(None)])
TYPES = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        inner.map(lambda one: list[one]),  # type: ignore[valid-type]
        st.tuples(inner, inner).map(lambda two: Union[two]),  # noqa: UP007 - made while it runs
    ),
    max_leaves=4,
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["1", "[1]", "null", "yes", "lin"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=5,
)


@given(JSON, TYPES)
def test_any_value_is_converted_or_refused(value: Any, wanted: Any) -> None:
    assert is_convertible(wanted)
    try:
        converted = convert(value, wanted)
    except BadValue as error:
        refusal = str(error)
        assert type_name(wanted) in refusal
        return
    again = convert(converted, wanted)
    assert repr(again) == repr(converted)


def test_nan_is_a_float_if_it_was_given_as_one() -> None:
    assert math.isnan(convert(math.nan, float))
    assert math.isnan(convert([math.nan], list[float])[0])


def test_of_a_list_the_bad_item_is_named() -> None:
    with pytest.raises(BadValue, match=r"\[1, 'x'\] is not of type list\[int\]: 'x' is not of type int"):
        convert([1, "x"], list[int])


def test_a_long_value_is_cut_in_the_reason() -> None:
    with pytest.raises(BadValue) as raised:
        convert("x" * 10_000, int)

    assert len(str(raised.value)) < 120


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        (float, "float"),
        (int | None, "int | None"),
        (Optional[list[float]], "list[float] | None"),  # noqa: UP045 - how older programs write it
        (Schedule, "Schedule(COSINE, LINEAR)"),
        (Literal["adam", "sgd"], "'adam' | 'sgd'"),
        (list, "list"),
        (Any, "Any"),
        (None, "None"),
    ],
)
def test_types_are_named_as_people_write_them(wanted: Any, name: str) -> None:
    assert type_name(wanted) == name
    assert is_convertible(wanted)


@pytest.mark.parametrize("wanted", [dict, dict[str, int], complex, bytes, list[bytes], int | bytes, "int", 5])
def test_what_cannot_be_converted_to_is_known_before(wanted: Any) -> None:
    assert not is_convertible(wanted)
