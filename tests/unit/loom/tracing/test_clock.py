import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom.tracing import clock
from loom.tracing.clock import ClockExchange, Offset, measured

SECONDS = st.floats(-1e6, 1e6)
DELAYS = st.floats(0, 10)


@pytest.mark.guarantees("tracing", "Clocks of hosts are compared, and the error is told")
@given(SECONDS, st.lists(st.tuples(DELAYS, DELAYS), min_size=1, max_size=10))
def test_the_true_offset_is_within_the_error(offset, delays):
    exchanges, at = [], 0.0
    for to, back in delays:
        exchanges.append(ClockExchange(at, at + to + offset, at + to + back))
        at += to + back
    found = measured(exchanges)
    assert abs(found.seconds - offset) <= found.error + 1e-6
    assert found.error <= min(to + back for to, back in delays) + 1e-6


def test_two_clocks_that_may_be_the_same_are():
    assert measured([ClockExchange(10.0, 10.25, 11.0)]) == Offset(0.0, 0.75)


def test_a_process_with_another_clock_is_put_on_this_ones_time_line():
    code = """
import sys, time
from loom.tracing import clock
clock.monotonic = lambda: time.monotonic() + 12345.0
exchanges = []
for _ in range(10):
    before = clock.monotonic()
    print(flush=True)
    exchanges.append(clock.ClockExchange(before, float(input()), clock.monotonic()))
clock.adopt(clock.measured(exchanges))
print(clock.now(), *clock.offset(), flush=True)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    with child:
        for _ in range(10):
            child.stdout.readline()
            child.stdin.write(f"{time.monotonic()!r}\n")
            child.stdin.flush()
        before = time.monotonic()
        there, offset, error = map(float, child.stdout.readline().split())
    assert abs(offset + 12345.0) <= error < 1.0
    assert there - error <= time.monotonic()
    assert there > before - 10.0


def test_the_offset_is_added():
    before = clock.offset()
    try:
        clock.adopt(Offset(1000.0, 0.1))
        assert 999.0 < clock.now() - time.monotonic() < 1001.0
    finally:
        clock.adopt(before)
