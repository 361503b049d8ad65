"""Special functions, statistics, products and distances."""
