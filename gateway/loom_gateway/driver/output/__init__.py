"""What the session's processes print: captured, merged and kept."""
