"""The cluster's side of Loom: the gateway, its drivers, and the workers."""
