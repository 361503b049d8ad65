"""A user's project, whose modules import each other, and values of it that travel."""
