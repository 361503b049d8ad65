"""The REST interface and the WebSocket for those who watch the weaver."""
