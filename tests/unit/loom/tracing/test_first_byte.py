import asyncio

import pytest

from loom.tracing import FirstByte, current_trace
from loom.tracing.spans import RECEIVED, listen


@pytest.fixture
def seen():
    records = []
    end = listen(records.append)
    yield records
    end()


def ask(path, *headers, kind="http"):
    """Return the trace in which the application runs, and the request's scope."""
    found = []

    async def app(scope, receive, send):
        found.append((current_trace(), scope))

    served = FirstByte(app, paths=["/update_weights"])
    asyncio.run(served({"type": kind, "method": "POST", "path": path, "headers": list(headers)}, None, None))
    return found[0]


def test_a_request_runs_in_the_trace_of_its_header(seen):
    trace, scope = ask("/update_weights", (b"x-trace-id", b"abc"))
    assert trace == "abc"
    received, http = seen
    assert (received["name"], received["path"], received["trace"]) == (
        "weights.server.recv",
        "/update_weights",
        "abc",
    )
    assert received["t"] == scope[RECEIVED] <= http["t"]
    assert (http["name"], http["trace"]) == ("http", "abc")


@pytest.mark.parametrize("id", [b"", b"x" * 65, b"a b", b"a\nb", "ü".encode(), b"\xff"])
def test_garbage_is_no_trace(seen, id):
    assert ask("/update_weights", (b"x-trace-id", id))[0] is None
    assert [record["trace"] for record in seen] == [None]


def test_other_paths_have_no_event(seen):
    assert ask("/completions")[0] is None
    assert seen == []


def test_what_is_no_request_is_passed_on(seen):
    assert ask("/update_weights", kind="websocket")[1].get(RECEIVED) is None
