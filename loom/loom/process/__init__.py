"""Child processes: starting them, waiting until they listen, ending them, and their exit codes."""
