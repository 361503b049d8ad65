"""Bytes of a stranger: what reads them raises its own errors, and takes memory in proportion."""

from __future__ import annotations

import importlib.util
import os
import re
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loom.errors import ProtocolMismatch
from loom.wire.frames import MAX_HEADER, decode_frame
from loom.wire.messages import Kind
from tests.support.paths import ROOT
from tests.unit.loom.wire.readers import READERS, read, seeds

repeatable = settings(derandomize=True, deadline=None, max_examples=200)

SECONDS = int(os.environ.get("LOOM_FUZZ_SECONDS", "60"))

WELL_FORMED = [bytes([number]) + seed for number, name in enumerate(READERS) for seed in seeds()[name]]

A_BYTE_TAKES = 200
"""Bytes of memory for a byte that is read, at most. An empty map is one byte of msgpack and an object of 64."""

AT_LEAST = 400_000
"""Bytes of memory for whatever is read, on top of that. Packing what is acknowledged takes 256 KiB."""

scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary()
)
values = st.recursive(
    scalars | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=8)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
kinds = st.sampled_from([int(kind) for kind in Kind]) | st.integers(0, 255)
heads = st.tuples(kinds, st.integers(0, 9), st.lists(values, max_size=4), st.just(()))


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    """Bytes that were in order once, and that somebody has been at."""
    data = bytearray(draw(st.sampled_from(WELL_FORMED)))
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(1, len(data)))
        how = draw(st.sampled_from(["change", "insert", "remove", "repeat"]))
        if how == "change":
            data[place : place + 1] = draw(st.binary(min_size=1, max_size=1))
        elif how == "insert":
            data[place:place] = draw(st.binary(min_size=1, max_size=8))
        elif how == "remove":
            del data[place : place + draw(st.integers(1, 20))]
        else:
            data[place:place] = data[place : place + draw(st.integers(1, 60))]
    return bytes(data)


def frame_of(header: Any) -> bytes:
    packed = msgpack.packb(header)
    return struct.pack(">I", len(packed)) + packed


@pytest.mark.parametrize("data", WELL_FORMED)
def test_what_is_in_order_is_read(data: bytes) -> None:
    list(READERS.values())[data[0]](data[1:])


@repeatable
@given(spoilt() | st.binary(max_size=300))
def test_what_is_not_in_order_raises_an_error_of_the_protocol_at_most(data: bytes) -> None:
    read(data)


@repeatable
@given(st.lists(heads, max_size=2))
def test_messages_of_any_bodies_raise_an_error_of_the_protocol_at_most(messages: Any) -> None:
    for reader, seq in ((b"\x00", 0), (b"\x01", 1), (b"\x02", 1)):
        frame = frame_of((seq, 0, messages))
        read(reader + (frame if seq == 0 else struct.pack(">H", len(frame)) + frame))


def peak(data: bytes) -> int:
    """Bytes of memory that it takes to read bytes, at the most."""
    read(data)  # the first time it may import and compile something
    tracemalloc.start()
    try:
        read(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@settings(repeatable, max_examples=50)
@given(spoilt())
def test_memory_is_in_proportion_to_what_came(data: bytes) -> None:
    assert peak(data) <= AT_LEAST + A_BYTE_TAKES * len(data)


CLAIMS = {
    "array 32": b"\xdd" + struct.pack(">I", MAX_HEADER - 4000),
    "array 16": b"\xdc\xff\xff",
    "map 32": b"\xdf" + struct.pack(">I", MAX_HEADER // 2 - 4000),
    "map 16": b"\xde\xff\xff",
    "array of one": b"\x91",
}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS.keys())
@pytest.mark.parametrize("depth", [1, 30, 500])
def test_lists_in_lists_that_each_claim_all_the_rest_take_no_memory(claim: bytes, depth: int) -> None:
    header = (claim * depth).ljust(MAX_HEADER, b"\xc0")
    frame = struct.pack(">I", len(header)) + header
    with pytest.raises(ProtocolMismatch):
        decode_frame(frame)
    assert peak(b"\x00" + frame) <= AT_LEAST + A_BYTE_TAKES * len(frame)


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 120)
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_atheris_finds_nothing(tmp_path: Path) -> None:
    for number, seed in enumerate(WELL_FORMED):
        (tmp_path / f"seed{number}").write_bytes(seed)
    # A shell forks before it starts: libFuzzer would count what this process has had in memory, which the kernel
    # hands down to what a process starts.
    done = subprocess.run(
        ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-m", "tests.unit.loom.wire.fuzz",
         f"-max_total_time={SECONDS}", "-max_len=4096", "-seed=1",
         "-rss_limit_mb=512", "-timeout=10", f"-artifact_prefix={tmp_path}/", str(tmp_path)],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=ROOT,
        timeout=2 * SECONDS + 100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    (runs,) = re.findall(r"Done (\d+) runs", done.stderr)
    print(f"{runs} inputs in {SECONDS} s; {re.findall(r'cov: .*', done.stderr)[-1]}")
    assert int(runs) > 1000
