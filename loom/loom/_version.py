"""The version of Loom, in one place."""

__version__ = "0.1.0"
