"""Subscriptions: what makes no sense is refused, and what stays subscribed is not sent again."""

from __future__ import annotations

from typing import Any

import pytest

from loom.errors import WrongArguments
from loom_gateway.weaver_socket.replica_columns import Column
from loom_gateway.weaver_socket.subscribers import PageSubscription, ShownSubscription, read_subscription


def test_each_field_may_be_left_out() -> None:
    assert read_subscription({"type": "subscribe", "id": 1}) == PageSubscription()
    assert read_subscription({"type": "subscribe", "columns": ["loss"], "rows": ["a"], "aggregates": True}) == (
        PageSubscription(aggregates=True, columns=["loss"], rows=["a"])
    )


@pytest.mark.guarantees(
    "page data",
    "A page's subscription, its frames' rate, what is kept for resuming and a feed without pages are bounded",
)
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"columns": ["step", "colour"]}, "no column 'colour'; there are state, step, loss, pace"),
        ({"columns": ["step"] * 5}, "columns"),
        ({"columns": "step"}, "columns"),
        ({"rows": [str(number) for number in range(201)]}, "200"),
        ({"rows": ["x" * 501]}, "rows.0"),
        ({"rows": [""]}, "rows.0"),
        ({"rows": [1]}, "rows.0"),
        ({"aggregates": "yes"}, "aggregates"),
        ({"everything": True}, "everything"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(WrongArguments, match=why):
        read_subscription({"type": "subscribe", "id": 1, **wrong})


def test_what_stays_subscribed_is_not_sent_again_and_what_comes_back_is() -> None:
    shown = ShownSubscription()
    shown.subscribe(PageSubscription(aggregates=True, columns=["loss", "step", "step"], rows=["a", "b"]))
    assert list(shown.columns) == [Column.STEP, Column.LOSS]
    shown.aggregates_at, shown.columns, shown.rows = 5, dict.fromkeys(shown.columns, 5), {"a": 5, "b": 5}
    shown.changed = False

    shown.subscribe(PageSubscription(aggregates=True, columns=["state", "step"], rows=["b", "c"]))
    assert shown.changed
    assert shown.columns == {Column.STATE: None, Column.STEP: 5}
    assert (shown.rows, shown.aggregates_at) == ({"b": 5, "c": None}, 5)

    shown.subscribe(PageSubscription())
    assert not shown
    shown.subscribe(PageSubscription(aggregates=True, columns=["step"], rows=["b"]))
    assert (shown.columns, shown.rows, shown.aggregates_at) == ({Column.STEP: None}, {"b": None}, None)
