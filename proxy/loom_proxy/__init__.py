"""The laptop's side of Loom: Monarch's client API over one WebSocket.

Imports neither torch nor torchmonarch. From the inside out: `loom.shape` and `loom_proxy.mesh.values` compute
with shapes, `loom_proxy.transport` moves frames, `loom_proxy.session` matches answers to operations,
`loom_proxy.futures` and `loom_proxy.mesh` are what a program holds, and `loom_proxy.job` is where it starts.
"""
