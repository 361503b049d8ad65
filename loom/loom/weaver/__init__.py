"""The weaver: it watches every replica and device, and commands them while they run.

The weaver is a process of its own (``python -m loom.weaver``), one for each gateway. Threadlets in training
processes talk to the weaver over the link of `loom.control`; the gateway talks to it over a unix socket.
"""
