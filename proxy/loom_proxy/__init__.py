"""The laptop's side of Loom: Monarch's client API over one WebSocket.

This package imports neither torch nor torchmonarch. From the inside out: `loom.shape` and `loom_proxy.mesh.values`
compute with shapes, `loom_proxy.transport` moves frames, and `loom_proxy.session` matches answers to operations. A
program starts with `loom_proxy.job` and holds the objects of `loom_proxy.futures` and `loom_proxy.mesh`.
"""

from __future__ import annotations

from loom.terminal_text import fit_log_records

fit_log_records()
