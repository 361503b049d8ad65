"""Commands about the time that calls and runs take."""
