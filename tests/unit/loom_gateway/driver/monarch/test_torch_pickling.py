"""Threads that pickle with torch while another one imports it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SLOW_TORCH = """
import os, sys, threading
goes_on = sys.modules.setdefault("goes_on", threading.Event())
sys.modules.setdefault("begun", threading.Event()).set()
goes_on.wait()
if os.environ.get("FAILS") and not os.path.exists(os.environ["FAILS"]):
    open(os.environ["FAILS"], "w").close()
    raise ImportError("a library of torch is missing")
class storage:
    class UntypedStorage: pass
    class TypedStorage: pass
"""

PROGRAM = """
import io, sys, threading, time
from loom_gateway.driver.monarch.torch_pickling import monarch_pickle, wait_for_torch
if sys.argv[1] == "repaired":
    wait_for_torch()
said = []
def pickle():
    buffer = io.BytesIO()
    try:
        monarch_pickle.torch_dump(1, buffer)
        said.append("pickled")
    except Exception as error:
        said.append(str(error))
first, second = threading.Thread(target=pickle), threading.Thread(target=pickle)
first.start()
while "begun" not in sys.modules:
    time.sleep(0.01)
sys.modules["begun"].wait()
second.start()
second.join(1.0 if sys.argv[1] == "repaired" else None)
sys.modules["goes_on"].set()
first.join()
second.join()
pickle()
print(*said, sep="; ")
"""


def said_by(tmp_path: Path, how: str, **environment: str) -> str:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(SLOW_TORCH)
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        env={**os.environ, "PYTHONPATH": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    return told.stdout.strip()


def test_a_thread_waits_until_another_has_imported_torch(tmp_path: Path) -> None:
    assert said_by(tmp_path, "repaired") == "pickled; pickled; pickled"


def test_an_import_that_fails_is_tried_again(tmp_path: Path) -> None:
    said = said_by(tmp_path, "repaired", FAILS=str(tmp_path / "failed"))
    assert said == "a library of torch is missing; pickled; pickled"


def test_monarch_alone_does_not_wait(tmp_path: Path) -> None:
    said = said_by(tmp_path, "as it is")
    if said == "pickled; pickled; pickled":
        pytest.fail("Monarch waits itself now: `torch_pickling` is not needed any more")
    assert said == "'NoneType' object is not callable; pickled; pickled"
