"""``loom demo`` and its kinds: what Loom does, on one machine."""
