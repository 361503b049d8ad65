"""The clients of a session: their connections, and what waits for them."""
