"""Checkpoints, each of which is complete or absent."""
