"""The training loop of a process of a replica group. The package needs torch, and most of it torchft."""
