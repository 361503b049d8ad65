"""Faults of a host: its processes, its network and its disks. The agent is the process that holds them."""
