import json

from loom.tracing.perfetto import to_perfetto


def process(name, *records, error=0.001):
    return {
        "name": name, "host": "h", "pid": 7, "role": None, "offset": 0.0, "error": error,
        "records": list(records), "left_out": 0, "problem": None,
    }  # fmt: skip


def span(name, t, dur_ms, trace=None, span=None, parent=None, **fields):
    return {"name": name, "t": t, "dur_ms": dur_ms, "trace": trace, "span": span, "parent": parent, **fields}


def events_of(*processes):
    return json.loads(to_perfetto(processes))["traceEvents"]


def test_a_span_inside_another_is_in_its_lane_and_one_that_overlaps_is_not():
    outer = span("outer", 10.0, 1000, span="a")
    inner = span("inner", 10.2, 100, span="b", parent="a")
    other = span("other", 10.1, 2000, span="c")
    lanes = {
        event["name"]: event["tid"] for event in events_of(process("p", outer, inner, other)) if event["ph"] == "X"
    }
    assert lanes["outer"] == lanes["inner"] != lanes["other"]


def test_lanes_nest_whatever_the_order():
    spans = [span(f"s{i}", 10.0 + (i * 37 % 50) / 10, 100 + i * 53 % 900) for i in range(60)]
    found = [event for event in events_of(process("p", *spans)) if event["ph"] == "X"]
    assert len(found) == 60
    for one in found:
        for two in found:
            if one is not two and one["tid"] == two["tid"] and one["ts"] <= two["ts"]:
                end, other = one["ts"] + one["dur"], two["ts"] + two["dur"]
                assert end <= two["ts"] or other <= end


def test_spans_of_a_trace_are_tied_together_across_processes():
    events = events_of(
        process("laptop", span("call", 1.0, 100, "abc", "a", endpoint="add")),
        process("driver", span("driver", 1.01, 80, "abc", "b")),
        process("actor", span("actor", 1.02, 60, "abc", "c"), span("load", 1.03, 10, "abc", "d", "c")),
    )
    flow = [event for event in events if event["name"] == "abc"]
    assert [event["ph"] for event in flow] == ["s", "t", "t", "f"]
    assert [event["pid"] for event in flow] == [1, 2, 3, 3]
    assert any(event["name"] == "call add" for event in events)


def test_an_event_is_an_instant_and_a_kernel_is_in_its_threads_lane():
    events = events_of(
        process(
            "p",
            {"name": "done", "t": 1.0, "trace": None},
            {"name": "aten::mm", "t": 1.0, "dur_ms": 2.0, "trace": None, "kernel": "cpu_op", "thread": "9"},
        )
    )
    assert {event["name"]: event["ph"] for event in events if event["ph"] in "iX"} == {"done": "i", "aten::mm": "X"}
    assert any(event["name"] == "thread_name" and event["args"]["name"] == "torch 9" for event in events)


def test_the_error_of_each_clock_is_told():
    events = events_of(process("p", error=0.0005), process("q", error=None))
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert "±0.50 ms" in names[0]
    assert "clock not compared" in names[1]


def test_garbage_in_a_record_does_not_break_the_file():
    bad = {"name": 5, "t": "soon", "dur_ms": float("nan"), "trace": "x" * 500, "loss": float("inf")}
    text = to_perfetto([process("p", bad)])
    assert "Infinity" not in text
    assert "NaN" not in text
