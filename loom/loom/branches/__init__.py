"""Branches: the start of a run's command again, from a checkpoint of the run, with other values."""
