"""Displays for people: notebook tables and the progress of long waits."""
