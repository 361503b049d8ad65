"""Where an order to load weights waits while completions stream: ``python -m tests.benchmarks queue``."""
