"""The forms in which values are shown: bounded, and whatever a user's methods do."""

from __future__ import annotations

from typing import Any

import pytest

import loom.driver_api
from loom.notebook.displays import LARGEST, LARGEST_TEXT, Record, display


class Session:
    """Stands in for a driver's session."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def show(self, record: str) -> None:
        self.records.append(Record.from_text(record))


@pytest.fixture(autouse=True)
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    session = Session()
    monkeypatch.setattr(loom.driver_api, "_here", session)
    return session


def shown(session: Session, value: Any) -> dict[str, Any]:
    display(value)
    return dict(session.records[-1].data)


def test_a_value_without_rich_forms_is_its_repr(session: Session) -> None:
    assert shown(session, [1, "a"]) == {"text/plain": "[1, 'a']"}
    assert shown(session, None) == {"text/plain": "None"}


def test_a_long_repr_is_cut(session: Session) -> None:
    text = shown(session, "a" * 2 * LARGEST_TEXT)["text/plain"]
    assert len(text) < LARGEST_TEXT + 50
    assert text.endswith(f"… and {LARGEST_TEXT + 2:,} more characters")


def test_a_bundle_and_methods_are_put_together_and_bytes_are_base64(session: Session) -> None:
    class Value:
        def _repr_mimebundle_(self, include: Any, exclude: Any) -> Any:
            return {"application/x-own": {"a": 1}, "text/plain": "its own"}, {"application/x-own": {"b": 2}}

        def _repr_jpeg_(self) -> bytes:
            return b"jpeg"

        def __repr__(self) -> str:
            return "repr"

    assert shown(session, Value()) == {
        "application/x-own": {"a": 1},
        "image/jpeg": "anBlZw==",
        "text/plain": "repr",
    }
    assert session.records[-1].metadata == {"application/x-own": {"b": 2}}


def test_a_form_that_is_too_large_or_no_data_is_left_out_with_a_note(session: Session) -> None:
    class Value:
        def _repr_html_(self) -> str:
            return "a" * (LARGEST - 14)

        def _repr_markdown_(self) -> str:
            return "b" * 11

        def _repr_json_(self) -> Any:
            return object()

        def __repr__(self) -> str:
            return "repr"

    data = shown(session, Value())
    assert set(data) == {"text/html", "text/plain"}
    assert data["text/plain"].splitlines() == [
        "repr",
        "[text/markdown left out: with its 13 bytes the display is over 4,194,304]",
        "[application/json left out: a object is neither text nor bytes nor JSON]",
    ]


def test_methods_that_raise_give_no_form(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    class Value:
        def _repr_html_(self) -> str:
            raise RuntimeError("broken")

        def __repr__(self) -> str:
            raise KeyError("broken too")

    assert shown(session, Value()) == {"text/plain": "<Value: its __repr__ raised KeyError: 'broken too'>"}
    assert capsys.readouterr().err == "Value._repr_html_ raised RuntimeError: broken\n"


def test_a_class_and_an_object_with_every_attribute_have_no_rich_forms(session: Session) -> None:
    class Rich:
        def _repr_html_(self) -> str:
            return "html"

    class Anything:
        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: "anything"

        def __repr__(self) -> str:
            return "plain"

    assert set(shown(session, Rich)) == {"text/plain"}
    assert shown(session, Anything()) == {"text/plain": "plain"}
