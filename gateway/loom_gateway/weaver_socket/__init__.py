"""The WebSocket ``/ws/v1/weaver``, for watching the weaver and commanding over it."""
