"""Generation of completions: an engine, an actor around it, an HTTP server, and ways to order new weights."""
