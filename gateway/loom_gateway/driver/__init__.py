"""The driver: one process for each session, the Monarch root client that owns the session's meshes.

- `loom_gateway.driver.clients.connection` listens on a unix socket and opens the session for the first client.
- `loom_gateway.driver.session.dispatcher` starts the client's operations in the order in which they arrive.
- `loom_gateway.driver.monarch.mesh_table` keeps the session's meshes by the ids that the client gave them.
- `loom_gateway.driver.monarch.root_client` attaches to the workers.
- `loom_gateway.driver.monarch.errors` turns failures into messages.
"""
