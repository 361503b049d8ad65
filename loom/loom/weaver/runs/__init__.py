"""Runs: the starts of trainings, and what became of them, as the weaver keeps them for a user."""
