"""The version of Loom, the one place that holds it.

The build reads it from here, and so does every module that reports it: `loom` itself would be an import of
everything public.
"""

__version__ = "0.1.0"
