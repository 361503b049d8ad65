"""The generators of a run, as its orchestrator sees them: their processes, requests and orders to them."""
