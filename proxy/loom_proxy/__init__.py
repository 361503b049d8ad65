"""The laptop's side of Loom: Monarch's client API over one WebSocket.

Imports neither torch nor torchmonarch. From the inside out: `loom_proxy.shape` and `loom_proxy.values` compute
with shapes, `loom_proxy.transport` moves frames, `loom_proxy.connection` matches answers to operations,
`loom_proxy.futures` and `loom_proxy.meshes` are what a program holds, and `loom_proxy.job` is where it starts.
"""
