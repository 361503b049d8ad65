"""Real GPUs."""
