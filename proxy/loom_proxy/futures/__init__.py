"""Futures of operations in the cluster, and waiting for them."""
