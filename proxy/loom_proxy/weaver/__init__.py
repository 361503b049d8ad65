"""The weaver, seen from the laptop."""
