"""The output of a run that is kept: text, with whole records between it, of a bounded size."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from loom.wire.bodies import RECORD, STDERR, STDOUT
from loom_gateway.driver.runs.output import KEPT_OUTPUT, KEPT_RECORDS, LINE_WITHIN, PAGE, RecordedOutput


@pytest.fixture
def logged() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def output(logged: list[tuple[str, str]]) -> Iterator[RecordedOutput]:
    loop = asyncio.new_event_loop()
    yield RecordedOutput(loop, lambda: None, lambda stream, text: logged.append((stream, text)))
    loop.close()


def test_records_stay_whole_and_in_their_place_and_are_not_logged(
    output: RecordedOutput, logged: list[tuple[str, str]]
) -> None:
    for stream, text in [
        (STDOUT, "a"),
        (STDOUT, "b"),
        (RECORD, "1"),
        (RECORD, "2"),
        (STDOUT, "c\n"),
        (STDERR, "d\n"),
    ]:
        output.write(stream, text)
    assert output.end == 8
    pieces = [(STDOUT, "ab"), (RECORD, "1"), (RECORD, "2"), (STDOUT, "c\n"), (STDERR, "d\n")]
    assert output.since(0)[1] == pieces
    assert output.since(1)[1] == [(STDOUT, "b"), *pieces[1:]]
    assert output.since(3)[1] == pieces[2:]
    assert logged == [("stdout", "ab"), ("stdout", "c\n"), ("stderr", "d\n")]


def test_long_text_does_not_push_out_a_later_record_and_is_cut(output: RecordedOutput) -> None:
    output.write(RECORD, "early")
    output.write(STDOUT, "a" * KEPT_OUTPUT)
    output.write(RECORD, "late")
    assert output.since(output.end - 4 - 1)[1] == [(STDOUT, "a"), (RECORD, "late")]
    output.write(STDOUT, "bc\n")
    assert output.end == KEPT_OUTPUT + 12
    assert output.since(0)[1] == [
        (STDERR, "… 8 characters of output dropped …\n"),
        (STDOUT, "a" * (KEPT_OUTPUT - 3)),
        (RECORD, "late"),
        (STDOUT, "bc\n"),
    ]
    assert output.kept_records == 4


def test_the_oldest_records_go_when_there_are_too_many(output: RecordedOutput) -> None:
    half = KEPT_RECORDS // 2
    output.write(RECORD, "1" * half)
    output.write(STDOUT, "between")
    output.write(RECORD, "2" * half)
    output.write(RECORD, "3")
    assert output.end == KEPT_RECORDS + 8
    position, (dropped, *kept) = output.since(0)
    assert dropped == (STDERR, f"… {half} characters of output dropped …\n")
    while position < output.end:
        position, more = output.since(position)
        kept += more
    assert kept == [(STDOUT, "between"), (RECORD, "2" * half), (RECORD, "3")]


def test_a_record_over_the_limit_is_dropped_and_nothing_breaks(output: RecordedOutput) -> None:
    output.write(RECORD, "1" * (KEPT_RECORDS + 1))
    output.write(STDOUT, "tex\n")
    assert output.end == KEPT_RECORDS + 5
    assert output.since(0)[1][1:] == [(STDOUT, "tex\n")]
    assert output.kept_records == 0


def test_long_records_come_page_by_page_and_a_single_one_whole(output: RecordedOutput) -> None:
    for text in ("1" * (PAGE - 1), "2", "3", "4" * (PAGE + 1)):
        output.write(RECORD, text)
    assert output.end == 2 * PAGE + 2
    pages, position = [], 0
    while position < output.end:
        position, pieces = output.since(position)
        pages.append([len(text) for _, text in pieces])
    assert pages == [[PAGE - 1, 1], [1], [PAGE + 1]]
    assert output.since(position) == (position, [])


def test_lines_of_the_run_and_of_its_processes_do_not_mix(output: RecordedOutput) -> None:
    output.write(STDOUT, "le")
    output.write(STDOUT, "ri", of_processes=True)
    output.write(STDOUT, "ft")
    output.write(STDOUT, "ght\n", of_processes=True)
    output.write(STDERR, "10 %\r20")
    output.write(STDOUT, "\nnext")
    assert output.end == 16
    assert output.since(0)[1] == [(STDOUT, "right\n"), (STDERR, "10 %\r"), (STDOUT, "left\n")]
    output.finish()
    assert "".join(text for _, text in output.since(16)[1]) == "20next"
    output.write(STDOUT, "later")
    assert output.end == 27


def test_a_line_without_an_end_is_passed_on_all_the_same(output: RecordedOutput) -> None:
    output._loop.call_later(LINE_WITHIN * 2, output._loop.stop)

    output.write(STDOUT, "a prompt> ")
    output._loop.run_forever()

    assert output.since(0)[1] == [(STDOUT, "a prompt> ")]
    output.write(STDOUT, "x" * 5000)
    assert output.end == 5010
