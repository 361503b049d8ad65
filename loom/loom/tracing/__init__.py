"""Events and spans of a program, with the trace id of the call they belong to.

They are written as JSON lines (``$LOOM_TIMING_DIR``) and as log lines (``$LOOM_TIMING_LINES=1``), and `loom trace`
collects them from every process of a session. When nobody asked for them, they cost less than a microsecond.

- `loom.tracing.spans` records; `loom.tracing.files` queues, and writes a process's file.
- `loom.tracing.lines` has the log lines, for writing and reading.
- `loom.tracing.clock` puts the clocks of several hosts on one line.
"""

from __future__ import annotations

from loom.tracing.clock import now
from loom.tracing.spans import FirstByte, Span, configure, event, flush, span
from loom.tracing.trace_ids import current_trace, trace

__all__ = ["FirstByte", "Span", "configure", "current_trace", "event", "flush", "now", "span", "trace"]
