"""Generation of completions: an engine, an actor with HTTP around it, a run's pool of actors, and new weights."""
