"""Runs of plans: the injection of each fault at its moment, its outcome, and the report."""
