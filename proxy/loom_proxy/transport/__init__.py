"""Carriers of frames between the laptop and a gateway: a WebSocket, or HTTP requests."""
