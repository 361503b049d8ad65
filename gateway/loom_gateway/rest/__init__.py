"""The REST interface, and the WebSocket for watching the weaver."""
