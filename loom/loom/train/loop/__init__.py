"""What a process of a replica group does step by step. Everything here needs torch, and most of it torchft."""
