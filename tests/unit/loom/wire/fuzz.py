"""``python -m tests.unit.loom.wire.fuzz [libFuzzer's options] [folder of seeds]``: fuzzes the readers with atheris.

It ends after ``-max_total_time`` seconds, or with an error where a reader raises what it may not.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["loom"]):
    from tests.unit.loom.wire.readers import read

if __name__ == "__main__":
    atheris.Setup(sys.argv, read)
    atheris.Fuzz()
