"""One client's session: its opening, its connection, and its calls and events."""
