"""A bridge to NATS, for monitors and tools that speak it: ``loom bridge nats://HOST:4222``.

What happens to replicas and devices goes to subjects of NATS, and what comes on others goes to the weaver as if a
user had said it. The bridge is a client of a gateway like any other: it watches, and it calls REST.
"""
