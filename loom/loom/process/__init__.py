"""Child processes: starting them, hearing that they listen, ending them, and their exit codes."""
