"""Torch's operations: what each gives, and how its gradients are computed."""
