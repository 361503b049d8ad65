"""Classes and functions that run in the cluster: `loom.cls` and `loom.fn`."""
