"""A bridge to NATS, for monitors and tools that speak it: ``loom bridge nats://HOST:4222``.

The bridge publishes the events of replicas and devices on subjects of NATS, and passes messages on other subjects
to the weaver like a user's commands. It is a client of a gateway like any other: it watches, and it calls REST.
"""
