"""The spans of a session's processes, gathered for `loom trace`."""
