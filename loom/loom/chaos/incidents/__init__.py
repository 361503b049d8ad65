"""Incidents: what a weaver's events say about real failures, and the plan of faults that replays them."""
