"""The loop from a diagnosis to a change of the running run, and back: see docs/guide/tune.md."""
