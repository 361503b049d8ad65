"""Clusters of Slurm: an allocation with a gateway on its first node and a worker on each."""
