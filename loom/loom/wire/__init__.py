"""Loom's wire protocol, sans-IO: bytes in, messages out.

The core opens no socket and reads no clock, so that the driver, the proxy and the tests share one implementation.
`loom.wire.sender` and `loom.wire.sockets` are the exceptions: they serve sockets. From the outside in:

- `loom.wire.frames` lays messages out as bytes. One WebSocket binary message is one frame.
- `loom.wire.mux` cuts large messages into chunks that share the connection, and puts them together again.
- `loom.wire.stream` numbers frames and checks their order: the two ends of one connection.
- `loom.wire.handshake` is the first exchange: version, capabilities, session.
- `loom.wire.codec` turns Python objects into payloads. Only the two ends use it; the gateway never does.
"""
