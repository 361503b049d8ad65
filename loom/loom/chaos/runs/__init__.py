"""Runs of plans: each fault injected at its moment, what becomes of it, and the report."""
