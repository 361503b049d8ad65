"""Checkpoints that are whole or not there at all."""
