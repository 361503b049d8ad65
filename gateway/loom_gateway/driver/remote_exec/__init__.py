"""What runs in the process of a rank for people: commands, terminals, connections, and copies of files."""
