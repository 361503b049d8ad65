"""A session's state and its operations."""
