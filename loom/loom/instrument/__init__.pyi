"""Every public name of `loom.instrument` and its module."""
