"""One client's session: opening it, its connection, and what comes in over it."""
