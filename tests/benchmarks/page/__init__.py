"""What the page costs with ten thousand replicas: ``python -m tests.benchmarks page``."""
