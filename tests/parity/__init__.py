"""The same scripts, run by a native Monarch root client, through Loom and in Loom's driver on the same workers.

``python -m tests.parity`` compares them with the native ones, prints each disagreement and how many agree.
"""
