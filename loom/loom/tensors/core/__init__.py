"""The operations that people write every day: their layouts and errors are computed on the laptop."""
