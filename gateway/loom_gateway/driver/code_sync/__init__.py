"""Synced folders on the hosts, and on the path of what is spawned there."""
