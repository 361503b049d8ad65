"""Functions that run in the driver."""
