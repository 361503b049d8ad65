"""Remote execution in the process of a rank: commands, terminals, connections, and copies of files."""
