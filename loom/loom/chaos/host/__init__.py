"""The faults of a host: its processes, its network and its disks. The agent is the process that holds them.

A function that injects a fault raises `FaultRefused` if the fault is impossible on this host.
"""
