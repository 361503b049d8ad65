"""The lines that a function of an event's kind makes are those of the slower ways."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom.tracing import encoding
from loom.tracing.encoding import encode
from loom.tracing.files import who
from loom.tracing.lines import FORMS, format_line

WHO = who(7, 'a"b')
VALUES = st.one_of(
    st.integers(-(10**400), 10**400),
    st.floats(),
    st.text(max_size=8),
    st.booleans(),
    st.none(),
    st.just("/weights"),
)
KEYS = sorted({field.name for form in FORMS.values() for field in form.fields} - {"t"})


@pytest.fixture(autouse=True)
def _no_functions(monkeypatch):
    monkeypatch.setattr(encoding, "_made", {})


@given(
    name=st.one_of(st.sampled_from(sorted(FORMS)), st.text(max_size=4)),
    fields=st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=4)), VALUES, max_size=5),
    trace=st.one_of(st.none(), st.just("abc123")),
)
def test_any_fields_have_the_lines_of_the_slower_ways(name, fields, trace):
    found = encode(name, 1.25, 2.5, WHO, trace, fields, True)
    if found is None:
        return
    line, said = found
    told = {"name": name, "t": 1.25, "time": 2.5, "pid": 7, "role": 'a"b', "trace": trace, **fields}
    record = json.loads(line)
    assert line.isascii()
    assert line.endswith("}\n")
    assert record.pop("host")
    assert repr(sorted(record.items())) == repr(sorted(json.loads(json.dumps(told)).items()))
    assert said == format_line(name, trace, {"t": 1.25, **fields})
    assert encode(name, 1.25, 2.5, WHO, trace, fields, False) == (line, None)


@pytest.mark.parametrize("name", FORMS)
def test_each_event_of_the_table_has_its_lines_by_a_function(name):
    fields = {
        field.name: "/a" if field.digits is None else 3.25 if field.digits else 3
        for field in FORMS[name].fields
        if field.name != "t"
    }
    for trace in (None, "abc123"):
        _, said = encode(name, 1.25, 2.5, WHO, trace, fields, True)
        assert said == format_line(name, trace, {"t": 1.25, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"step": "x", "write_ms": 1.0},
        {"step": 10**400, "write_ms": 1.0},
        {"step": float("nan"), "write_ms": 1.0},
        {"step": 1, "write_ms": 10**5000},
        {"step": Path("/a"), "write_ms": 1.0},
        {"step": [], "write_ms": 1.0},
    ],
)
def test_what_it_cannot_write_is_left_to_the_slower_ways(fields):
    assert encode("ckpt.write.done", 1.0, 2.0, WHO, None, {"step": 1, "write_ms": 1.0}, True)
    assert encode("ckpt.write.done", 1.0, 2.0, WHO, None, fields, True) is None
    assert encode("ckpt.write.done", 1.0, 2.0, WHO, None, {"step": 1, "write_ms": 1.0}, True)


@pytest.mark.parametrize("op", ["a b", 'a"', "a,", "", "é\u2028"])
def test_a_text_that_would_end_its_field_is_left_to_them(op):
    assert encode("weights.rpc.start", 1.0, 2.0, WHO, None, {"op": op}, True) is None
    assert encode("weights.rpc.start", 1.0, 2.0, WHO, None, {"op": op}, False)


def test_a_name_that_is_no_text_and_a_field_that_is_code_do_nothing():
    assert encode(3, 1.0, 2.0, WHO, None, {}, False) is None
    line, _ = encode("load", 1.0, 2.0, WHO, None, {"}') or print('": 1, "v0": 2, "_t": 3, "class": 4}, False)
    assert json.loads(line)["}') or print('"] == 1


def test_a_program_with_fields_that_never_repeat_fills_no_memory(monkeypatch):
    monkeypatch.setattr(encoding, "MOST", 3)
    found = [encode("load", 1.0, 2.0, WHO, None, {f"key{number}": 1}, False) for number in range(5)]
    assert [each is None for each in found] == [False, False, False, True, True]
    assert len(encoding._made) == 3
