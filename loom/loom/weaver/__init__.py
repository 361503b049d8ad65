"""The weaver: sees every replica and device, and changes them while they run.

It is a process of its own (``python -m loom.weaver``), one to a gateway. Threadlets in training processes talk to
it over the link of `loom.control`; the gateway asks it over a unix socket.
"""
