"""Faults of a host: its processes, its network and its disks. The agent is the process that holds them.

Whatever makes a fault raises `FaultRefused` if this host cannot have it.
"""
