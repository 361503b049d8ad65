import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom.tracing.lines import FORMS, format_line, parse_line

SEED = [
    ("[ckpt] wait.start target_step=3", "ckpt.wait.start", None, {"target_step": 3}),
    ("[ckpt] write.done step=3 write_ms=234.5", "ckpt.write.done", None, {"step": 3, "write_ms": 234.5}),
    ("[ckpt] wait.done target_step=3 wait_ms=232.1", "ckpt.wait.done", None, {"target_step": 3, "wait_ms": 232.1}),
    (
        "[weights][abc123] client.send url=http://h:1 path=/update_weights t=0.236",
        "weights.client.send",
        "abc123",
        {"url": "http://h:1", "path": "/update_weights", "t": 0.236},
    ),
    (
        "[weights][abc123] server.recv path=/update_weights t=0.237",
        "weights.server.recv",
        "abc123",
        {"path": "/update_weights", "t": 0.237},
    ),
    (
        "[weights][abc123] rpc.start op=update_weights t=0.238",
        "weights.rpc.start",
        "abc123",
        {"op": "update_weights", "t": 0.238},
    ),
    (
        "[weights][abc123] rpc.done op=update_weights t=1.457 rpc_ms=1219.0",
        "weights.rpc.done",
        "abc123",
        {"op": "update_weights", "t": 1.457, "rpc_ms": 1219.0},
    ),
    (
        "[weights][abc123] client.done wall_ms=1222.0 rpc_ms=1219.0 queue_ms=3.0",
        "weights.client.done",
        "abc123",
        {"wall_ms": 1222.0, "rpc_ms": 1219.0, "queue_ms": 3.0},
    ),
    (
        "[gen] batch.start inflight=96 target_batch=64",
        "gen.batch.start",
        None,
        {"inflight": 96, "target_batch": 64},
    ),
    (
        "[gen] batch.done completions=64 dur_ms=2109.0 inflight=96",
        "gen.batch.done",
        None,
        {"completions": 64, "dur_ms": 2109.0, "inflight": 96},
    ),
    (
        "[rollout] trunc_pct=5.2 current_step=5 ckpt_step=3 staleness=2",
        "rollout",
        None,
        {"trunc_pct": 5.2, "current_step": 5, "ckpt_step": 3, "staleness": 2},
    ),
    ("Step 5 begins", "step.begin", None, {"step": 5}),
    ("Step 5 complete (wall=3.570s)", "step.complete", None, {"step": 5, "wall": 3.57}),
    ("Hit async barrier (5-2 > 2)", "barrier", None, {"step": 5, "ckpt_step": 2, "async_level": 2}),
    (
        "[train] step.done step=3 rank=0 dur_ms=12.5",
        "train.step.done",
        None,
        {"step": 3, "rank": 0, "dur_ms": 12.5},
    ),
    (
        "[train] batch.wait step=3 rank=0 wait_ms=1.0",
        "train.batch.wait",
        None,
        {"step": 3, "rank": 0, "wait_ms": 1.0},
    ),
    ("[gen] idle wait_ms=7.5", "gen.idle", None, {"wait_ms": 7.5}),
]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (2.7, "3"),
        (-0.2, "-0"),
        (True, "1"),
        ("4", "4"),
        (2**53 + 1, "9007199254740992"),
        (10**400, "?"),
        ("x", "?"),
    ],
)
def test_a_number_of_another_kind_is_rounded_to_the_digits_of_its_field(step, said):
    fields = {"step": step, "write_ms": 3}
    assert format_line("ckpt.write.done", None, fields) == f"[ckpt] write.done step={said} write_ms=3.0"
    assert format_line("ckpt.write.done", None, {"write_ms": float("nan")}) == "[ckpt] write.done write_ms=nan"


def test_the_table_is_covered():
    assert {name for _, name, _, _ in SEED} == set(FORMS)


@pytest.mark.guarantees("tracing", "The seed's log lines are written and read by one table")
@pytest.mark.parametrize(("line", "name", "trace", "fields"), SEED)
def test_a_line_is_formatted_and_parsed(line, name, trace, fields):
    assert format_line(name, trace, fields) == line
    assert parse_line(line) == (name, trace, fields)


@pytest.mark.parametrize(
    "form", ["1.458   Orchestrator        {}", "2026-01-02T03:04:05Z [INFO] {}", "\x1b[32m{}\x1b[0m"]
)
@pytest.mark.parametrize(("line", "name", "trace", "fields"), SEED)
def test_a_line_is_found_behind_a_prefix_and_colours(form, line, name, trace, fields):
    assert parse_line(form.format(line)) == (name, trace, fields)


def test_brackets_and_commas_around_fields_are_no_part_of_them():
    assert parse_line("[gen] batch.start (inflight=96, target_batch=64)") == (
        "gen.batch.start",
        None,
        {"inflight": 96, "target_batch": 64},
    )
    assert parse_line("[weights][a] client.send (path=/weights(1)/x)").fields == {"path": "/weights(1)/x"}


@pytest.mark.guarantees("tracing", "The seed's log lines are written and read by one table")
def test_a_line_of_the_seed_without_the_fields_it_leaves_out():
    assert parse_line("0.236   Orchestrator        [weights][abc123] client.send t=0.236").fields == {"t": 0.236}


def test_an_event_without_a_trace_has_a_dash():
    assert parse_line(format_line("weights.rpc.start", None, {"op": "x", "t": 1})).trace is None


@pytest.mark.parametrize(
    "line",
    [
        "[ckpt] write.done step=3",
        "[ckpt] write.done step=three write_ms=1",
        "[ckpt] write.done step=3 write_ms=nan",
        "[weights][] client.done wall_ms=1 rpc_ms=1 queue_ms=0",
        "[weights][a;b] client.done wall_ms=1 rpc_ms=1 queue_ms=0",
        "Step 5 complete (wall=",
        "Hit async barrier (5-x > 2)",
    ],
)
def test_a_broken_line_says_what_is_wrong(line):
    with pytest.raises(ValueError, match=r"without|with|words"):
        parse_line(line)


@pytest.mark.parametrize(
    "line", ["", "hello", "Step by step", "[gen] other", "[gen] batch.doneness x=1", "[weights] loaded"]
)
def test_other_lines_are_none(line):
    assert parse_line(line) is None


def test_an_unknown_name_has_no_line():
    assert format_line("load", None, {}) is None


@given(st.text(), st.text())
def test_any_text_in_a_field_stays_one_line_and_comes_back(url, path):
    line = format_line("weights.client.send", "a", {"url": url, "path": path, "t": 1.0})
    assert len(line.splitlines()) == 1
    assert parse_line(line).fields == {"url": url, "path": path, "t": 1.0}


@given(st.text())
def test_any_text_is_parsed_or_refused(text):
    for head in ("", "[ckpt] write.done ", "[weights][", "Step 1 complete "):
        with contextlib.suppress(ValueError):
            parse_line(head + text)
