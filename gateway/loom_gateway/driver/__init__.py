"""The driver: one process a session, which is the Monarch root client that owns the session's meshes.

- `loom_gateway.driver.server` listens on a unix socket and serves one client at a time.
- `loom_gateway.driver.session.operations` runs the client's operations in the order in which they came.
- `loom_gateway.driver.monarch.mesh_table` knows the session's meshes by the ids that the client gave them.
- `loom_gateway.driver.monarch.root_client` attaches to the workers.
- `loom_gateway.driver.monarch.errors` turns failures into messages.
"""
