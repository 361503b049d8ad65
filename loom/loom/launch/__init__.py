"""Commands on the hosts of a cluster: their environment, their folder and their ranks, for ``loom run --on``."""
