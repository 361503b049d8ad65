"""Gateways in allocations of Slurm: the way to them, and jobs that have one of their own."""
