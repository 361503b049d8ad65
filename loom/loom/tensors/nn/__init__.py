"""Networks of lazy tensors, with torch's names: modules, layers and losses."""
