"""Benchmarks: ``python -m tests.benchmarks calls`` measures what a call costs, beside its budgets.

Every subject (a raw WebSocket, native Monarch, Loom, Ray Client) runs in a process of its own, the caller, which
starts the servers that it needs as its children. The process that prints the report asks one caller at a time.
"""
