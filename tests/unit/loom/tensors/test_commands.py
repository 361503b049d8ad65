"""The encoding of commands: what goes in comes out, and what repeats is short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom.errors import ProtocolMismatch
from loom.tensors.layouts import float16
from loom.tensors.sending import encoding as commands
from loom.tensors.sending.encoding import FREE, CommandDecoder, CommandEncoder, Form, S, T

ADD = Form("add", (T(0), T(1)), tensors=2)
SCALE = Form("mul", (T(0), S(0)), tensors=1, numbers=1)
SPLIT = Form("split", (T(0), 2), tensors=1, outs=3)
MADE = Form(".made", ("zeros",), outs=40)
FORMS = (ADD, SCALE, SPLIT, FREE)


class Pair:
    """Both sides; remembers what was put in since the last batch."""

    def __init__(self) -> None:
        self.encoder, self.decoder = CommandEncoder(), CommandDecoder()
        self.put_in: list[tuple[Form, int, tuple[int, ...], tuple[float, ...]]] = []
        self.put(MADE)
        self.travel()

    def put(self, form: Form, *tensors: int, numbers: tuple[float, ...] = ()) -> int:
        number = self.encoder.form(form, tuple(map(type, numbers)))
        first = self.encoder.put(number, tensors, numbers)
        self.put_in.append((form, first, tensors, numbers))
        return first

    def travel(self) -> int:
        """Send what was put in, and check what arrives; return the bytes."""
        packed = self.encoder.take()
        now, _, sequence, values = self.decoder.take(packed)
        assert len(sequence) == len(self.put_in)
        for number, (form, first, tensors, numbers) in zip(sequence, self.put_in, strict=True):
            index, *rest = self.decoder.commands[number]
            known = self.decoder.forms[index]
            assert known.function == form.function
            assert now == first
            assert tuple(now + each if each < 0 else each for each in rest[: known.tensors]) == tensors
            found = rest[known.tensors] if len(rest) > known.tensors else [next(values) for _ in numbers]
            assert list(map(repr, found)) == list(map(repr, numbers))
            now += known.outs
        assert next(values, None) is None
        self.put_in.clear()
        return len(packed)


@given(st.data())
def test_what_goes_in_comes_out(data: st.DataObject) -> None:
    pair = Pair()
    last = 41
    for _ in range(data.draw(st.integers(1, 4))):
        body = data.draw(
            st.lists(st.tuples(st.sampled_from(FORMS), st.integers(0, 30), st.booleans()), max_size=12)
        )
        for _ in range(data.draw(st.integers(1, 6))):
            for form, back, far in body:
                tensor = 1 + back if far else last - 1 - back
                numbers = (
                    (data.draw(st.sampled_from([0.5, 1.0, -0.0, 0.0, 3.25, float("inf")])),)
                    if form is SCALE
                    else ()
                )
                last = pair.put(form, *[tensor] * form.tensors, numbers=numbers) + form.outs
        pair.travel()


def test_a_step_that_repeats_is_some_bytes() -> None:
    pair = Pair()
    weight = pair.put(SPLIT, 1)

    def step() -> int:
        at = weight
        for _ in range(400):
            at = pair.put(ADD, at, weight)
        return pair.travel()

    first = step()
    for _ in range(19):
        step()
    assert step() < 100 < 1000 < first


def test_numbers_that_differ_each_time_go_along() -> None:
    pair = Pair()
    sizes = []
    for round_ in range(40):
        for place in range(100):
            pair.put(SCALE, 1, numbers=(round_ + place / 7,))
        sizes.append(pair.travel())
    assert max(sizes[20:]) < 100 * 10 + 100
    assert len(pair.decoder.commands) < 1000


def test_numbering_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MOST_COMMANDS", 50)
    monkeypatch.setattr(commands, "MOST_FORMS", 30)
    pair = Pair()
    for round_ in range(60):
        for place in range(20):
            pair.put(ADD, 1 + place, 1 + round_ % 40)
            pair.put(Form("select", (T(0), round_), tensors=1), 1 + place)
        pair.travel()
    assert len(pair.decoder.commands) < 100
    assert len(pair.decoder.forms) < 50


def test_arguments_travel() -> None:
    given = (T(300), [1, T(0)], slice(1, None, 2), ..., None, float16, 2 + 3j, -0.0, (True, 1, 1.0), "same")
    pair = Pair()
    pair.put(Form("f", given, (("key", given),), tensors=0))
    pair.travel()
    form = pair.decoder.forms[-1]
    assert repr(form.args) == repr(given)
    assert repr(form.kwargs) == repr((("key", given),))
    assert pair.encoder.form(Form("f", (1,))) is not pair.encoder.form(Form("f", (1.0,)))


@pytest.mark.parametrize("packed", [b"", b"\xc1", b"\x93\x01\x02\x03", commands.CommandEncoder().take()[:-1]])
def test_garbage_is_refused(packed: bytes) -> None:
    with pytest.raises(ProtocolMismatch):
        CommandDecoder().take(packed)


def test_a_batch_that_is_missing_is_noticed() -> None:
    pair = Pair()
    pair.put(ADD, 1, 1)
    pair.encoder.take()
    pair.put(ADD, 1, 1)
    with pytest.raises(ProtocolMismatch, match="begins with id 42, not 41"):
        pair.decoder.take(pair.encoder.take())
