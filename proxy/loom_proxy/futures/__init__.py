"""Results that are on their way, and waiting for them."""
