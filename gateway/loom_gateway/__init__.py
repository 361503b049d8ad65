"""The cluster's side of Loom: the gateway, its drivers, and the workers."""

from __future__ import annotations

from loom.terminal_text import fit_log_records

fit_log_records()
