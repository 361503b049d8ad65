"""Synchronised folders on the hosts, and on the ``sys.path`` of processes there."""
