"""The version of Loom, in the only place that holds it.

The build reads it from here, and so does every module that reports it, because importing `loom` would import
everything public.
"""

__version__ = "0.2.0"
