"""What other processes of a user id can see of one with secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.other_users import as_root, as_user, reachable_python

SECRET = "a secret of the tests"

HOLDS = """
import os
from loom.process.own_secrets import hide_from_proc, keep_memory_private
{protect}
print("ready", os.environ["LOOM_TEST_SECRET"], flush=True)
input()
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


@contextmanager
def holder(protect: str, *before: str) -> Iterator[int]:
    """A process with a secret in its environment; its id."""
    process = subprocess.Popen(
        [*before, sys.executable, "-c", HOLDS.format(protect=protect)],
        env={**os.environ, "LOOM_TEST_SECRET": SECRET},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    try:
        assert process.stdout.readline() == f"ready {SECRET}\n"
        yield process.pid
    finally:
        process.communicate("\n", timeout=10)


def test_a_hidden_variable_is_not_in_the_environment_that_the_kernel_shows() -> None:
    with holder("hide_from_proc('LOOM_TEST_SECRET')") as pid:
        shown = Path(f"/proc/{pid}/environ").read_bytes()

    assert b"LOOM_TEST_SECRET=" in shown
    assert SECRET.encode() not in shown


@as_root
@pytest.mark.parametrize("file", ["environ", "mem", "fd", "maps"])
def test_a_process_of_the_same_user_id_cannot_look_into_a_private_one(file: str) -> None:
    def looks(pid: int, before: Sequence[str]) -> str:
        look = f"import os; os.open('/proc/{pid}/{file}', os.O_RDONLY)"
        return subprocess.run([*before, sys.executable, "-c", look], capture_output=True, text=True).stderr

    with reachable_python() as reachable:
        before = [*reachable, *as_user(54321)]
        with holder("keep_memory_private()", *before) as private, holder("", *before) as public:
            at_the_private, at_the_public = looks(private, before), looks(public, before)

    assert "PermissionError" in at_the_private
    assert at_the_public == ""
