"""The bytes of a message of each kind: they are part of the protocol, and other versions of Loom read them."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest

import loom.wire.bodies
import loom.wire.handshake  # noqa: F401 - their classes fill `BODIES`
from loom.wire.body import BODIES
from loom.wire.frames import encode_frame, sealed
from loom.wire.messages import Kind

VALUES = {
    "Any": None,
    "int": 7,
    "Id": -3,
    "bool": True,
    "float": 1.5,
    "str": "tëxt",
    "bytes": b"\x00\xff",
    "Sequence[Any]": [1, "a"],
    "Sequence[int]": [1, 2],
    "Sequence[str]": ["a"],
    "Mapping[str, Any]": {"a": 1},
    "Mapping[str, int]": {"a": 1},
    "Mapping[str, str]": {"a": "b"},
    "Mapping[str, Sequence[int]]": {"a": [1]},
}
"""The value of each field, by its annotation."""

GOLDEN = """
HELLO:fa30ff7a WELCOME:3e64c11f REFUSE:5de60767 OPEN:3135ef22 DESCRIBE:b3570b0d DESCRIPTION:af78f3d5
RESTORE:405b6044
CHUNK:02589926 PROBE:c652ca98 PROBED:f867665a SPAWN_PROCS:27cd2570 SPAWN_ACTORS:cedcdc6d VIEW:329c46d3
STOP:f1e08cf1 INITIALIZED:2bec5ad8 WITH_PYTHON:57dee879 HOST_OF:2e5cf984 ALL_HOSTS:0d47eda6 STOP_HOSTS:ce24a36b
LIVING_HOSTS:487c23f9 REFRESH_HOSTS:7218831d UNDELIVERED:0877740f FORGET:f8a7da89 COLLECT:50c02b2a LIFE:7bf4dfdf
READ:722cd531 DROP:e515fc73 CALL:6ad90ef4 CALL_ONE:2860049f CHOOSE:cf3f8a50 STREAM:8f2ec581 BROADCAST:ed0348b3
SEND:5d04f1c7 RUN:7cc8e507 MESHES:e33b3098 RUNS:41ee2657 RUN_RESULT:1098c9f7 RUN_OUTPUT:9b6b4799 RUN_END:81f3b287
CANCEL:28f9a3c6 RECONFIGURE:123c1257 END:5a23b9f2 ASK_WEAVER:22f27f14 PORT_OPEN:ef91a8ee PORT_SEND:4b8a9fc7
PORT_CREDIT:f0427388 PORT_CLOSE:d8dda5e6 SPANS:3ec32014 RANK:d7e2a137 LOG_OPTIONS:a3403e59 FLUSH_LOGS:6112531f
SYNC:f7e88ef1 SYNC_PIECES:645aaf04 SYNC_COMMIT:47d369bd DEBUG:1e1454f3 CLOCK:10de378b COLLECT_SPANS:3a8887cb
RESULT:06b3165b ERROR:3be2fe93 EVENT:11c58e35 ENDED:aa02fa96 PORT_MESSAGES:a3ed0fee PORT_MESSAGE:0d8922e6
LOG:ac9e0ccb RUN_STATE:ced7c944 TIE:93d1f2ff TIED:f6d30444 UNTIED:dd559c50 PROCESS_OUTPUT:41732c3e
OUTPUT_SKIPPED:face691c FLUSH_OUTPUT:0864517a OUTPUT_FLUSHED:e3f7a983 PROCESS_ENDED:aac87519
LINE_HELD:a3274395 CHALLENGE:da8eaf7b WATCH:a21175c7 PROCESSES_GONE:803d6e75 TELL_END:11e51f5f HOST_LEAVING:f93b3e61
"""

DIGESTS = dict(one.split(":") for one in GOLDEN.split())
"""Of the frame of each kind's message, with every field and with as many of them None as may be."""


def frame_of(kind: Kind, none: bool) -> bytes:
    fields = dataclasses.fields(BODIES[kind])  # type: ignore[arg-type]
    values = {
        field.name: None
        if none and str(field.type) not in VALUES
        else VALUES[str(field.type).removesuffix(" | None")]
        for field in fields
    }
    message = BODIES[kind](**values).message(5, [b"xy", b"z"])
    return b"".join(encode_frame(3, 2, [sealed(message)]))


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_a_message_has_the_bytes_that_it_always_had(kind: Kind) -> None:
    frames = frame_of(kind, False) + frame_of(kind, True)

    assert hashlib.sha256(frames).hexdigest()[:8] == DIGESTS[kind.name]
