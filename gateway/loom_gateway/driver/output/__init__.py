"""The output of the session's processes: captured, merged and kept."""
