"""A driver's own output, and its session's log, survive a disk that takes nothing, and say what is missing."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from loom_gateway.driver.output.spool import LogSpool

PRINTS = """
import logging, os, sys
from loom_gateway.driver.output.own_log import survive_full_disk
from loom_gateway.driver.runs.output import route_output
survive_full_disk()
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
if sys.argv[1] == "routed":
    route_output()
for number in range(3000):
    print("a line", number)
    print("a line", number, file=sys.stderr, flush=True)
    logging.info("logged %d", number)
sys.stdout.flush()
sys.stdout.buffer.write(b"bytes")
sys.__stdout__.write("more")
os.write(3, b"survived")
"""


@pytest.mark.guarantees(
    "disk and clock",
    "A full disk makes no `print` of a run raise, and the session's log says how many lines it lacks",
)
@pytest.mark.parametrize("how", ["routed", "plain"])
def test_a_print_raises_nothing_on_a_full_disk(how: str) -> None:
    survived, end = os.pipe()
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            ["bash", "-c", f'exec "$0" -c "$1" {how} 3>&{end}', sys.executable, PRINTS],
            stdout=full,
            stderr=full,
            pass_fds=[end],
            timeout=60,
            check=False,
        )
    os.close(end)
    with open(survived, "rb") as said:
        assert (said.read(), done.returncode) == (b"survived", 0)


def test_a_file_says_what_is_missing_in_it(tmp_path: Path) -> None:
    path = tmp_path / "out"
    code = (
        "import resource, sys\n"
        "from loom_gateway.driver.output.own_log import survive_full_disk\n"
        "survive_full_disk()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))\n"
        "print('x' * 99, file=sys.stderr)\n"
        "print('y' * 500, file=sys.stderr)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "print('z', file=sys.stderr)\n"
    )
    with path.open("wb") as out:
        subprocess.run([sys.executable, "-c", code], stderr=out, timeout=60, check=True)

    assert path.read_text() == "x" * 99 + "\n\n… 501 bytes were left out here: File too large …\nz\n"


@pytest.mark.guarantees(
    "disk and clock",
    "A full disk makes no `print` of a run raise, and the session's log says how many lines it lacks",
)
def test_a_sessions_log_says_how_many_lines_are_missing(tmp_path: Path) -> None:
    told: list[str] = []
    spool = LogSpool(str(tmp_path / "log"))
    spool.tell = told.append
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        spool.append([{"text": "first"}])
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))
        for number in range(7):
            spool.append([{"text": f"{number} " + "x" * 200}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    spool.append([{"text": "last"}])
    spool.close()

    lines = (tmp_path / "log").read_text().splitlines()
    whole = [json.loads(line) for line in (lines[0], *lines[-2:])]
    assert [line["text"] for line in whole] == [
        "first",
        "… 6 lines are missing here: the disk of the session's log was full …",
        "last",
    ]
    assert told == [
        "… the session's log takes no lines now (File too large): `loom logs` will not have them …",
        "… 6 lines are missing here: the disk of the session's log was full …",
    ]
