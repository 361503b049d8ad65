"""Lines of what processes print: how they are cut, and brought together."""

from __future__ import annotations

from loom_gateway.driver.output.collector import LONGEST_LINE, Aggregator, LineSplitter


def test_a_progress_bar_is_one_line() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"\r10 %\r20 %\r") == []
    assert splitter.feed(b"30 %\r99 %\r100 %\ndone\r\n") == ["100 %", "done"]
    assert not splitter.has_rest
    splitter.feed(b"half a l")
    assert splitter.flush() == ["half a l"]
    assert splitter.flush() == []


def test_an_endless_line_is_cut() -> None:
    splitter = LineSplitter()
    pieces = [piece for _ in range(10) for piece in splitter.feed(b"z" * LONGEST_LINE)]
    assert [len(piece) for piece in pieces] == [LONGEST_LINE] * 9
    assert splitter.flush() == ["z" * LONGEST_LINE]


def test_aggregation_keeps_the_order_of_each_rank() -> None:
    aggregator = Aggregator()
    for rank in range(2):
        for text in ("Traceback", "  in f", "  ^^^", "  in g", "  ^^^", "Error"):
            aggregator.add(0.0, rank, "stderr", text)
    lines = aggregator.take()
    assert [(line.text, line.count) for line in lines] == [
        ("Traceback", 2), ("  in f", 2), ("  ^^^", 2), ("  in g", 2), ("  ^^^", 2), ("Error", 2)
    ]  # fmt: skip
    for _ in range(1000):
        aggregator.add(0.0, 0, "stdout", "again")
    aggregator.add(0.0, 0, "stderr", "again")
    assert [(line.stream, line.count, line.ranks) for line in aggregator.take()] == [
        ("stdout", 1000, [0]),
        ("stderr", 1, [0]),
    ]
    assert len(aggregator) == 0
