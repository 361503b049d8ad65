"""Two matrices are multiplied in the cluster; here nothing waits until the result is read.

It needs no torch and no numpy here.
"""

import os
import time

import loom

with loom.connect() if "LOOM_URL" in os.environ else loom.local() as job:
    lt = job.tensors()
    lt.synchronize()  # the process has started

    began = time.perf_counter()
    a = lt.randn(128, 128)
    b = lt.randn(128, 128)
    c = a @ b
    print(f"queued in {(time.perf_counter() - began) * 1e3:.1f} ms: {c}")

    rows = c.tolist()  # this waits
    print(f"read after {(time.perf_counter() - began) * 1e3:.1f} ms: {len(rows)} rows of {len(rows[0])}")
    corner = c[:2, :2] * 2
    print(f"the corner, doubled, is {corner.tolist()}; now it is known here: {corner}")
