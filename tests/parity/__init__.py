"""The same scripts, run by a native Monarch root client and through Loom on the same workers, and compared.

``python -m tests.parity`` prints each disagreement and how many agree.
"""
