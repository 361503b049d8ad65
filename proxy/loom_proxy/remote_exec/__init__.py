"""Work in the processes of ranks: commands, terminals, copies and forwarded ports."""
