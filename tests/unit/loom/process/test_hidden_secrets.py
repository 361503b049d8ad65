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
from loom.process.hidden_secrets import hide_from_proc, keep_memory_private
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


@pytest.mark.parametrize("value", [SECRET, "another"])
def test_an_ancestor_that_was_started_with_the_variable_is_known(value: str) -> None:
    looks = f"""
import os, subprocess, sys
from loom.process.hidden_secrets import ancestors_that_show
if len(sys.argv) == 1:
    print(os.getpid(), flush=True)
    del os.environ["LOOM_TEST_SECRET"]
    subprocess.run(["sh", "-c", '"$@"; :', "sh", sys.executable, "-c", sys.orig_argv[2], "child"])
else:
    print(ancestors_that_show("LOOM_TEST_SECRET", {value!r}))
"""
    variables = {**os.environ, "LOOM_TEST_SECRET": SECRET}
    ended = subprocess.run([sys.executable, "-c", looks], env=variables, capture_output=True, text=True, check=True)
    pid, shown = ended.stdout.split("\n", 1)
    assert shown == (f"[{pid}]\n" if value == SECRET else "[]\n")


@pytest.mark.guarantees(
    "drivers", "A driver of the gateway's user id cannot read the gateway's memory, descriptors or environment"
)
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
