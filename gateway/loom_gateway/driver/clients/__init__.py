"""The clients of a session: their connections, and the messages that wait for them."""
