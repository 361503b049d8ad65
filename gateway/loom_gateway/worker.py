"""Alias: ``python -m loom_gateway.worker`` runs `loom_gateway.workers.host`, to which this module moved."""

from loom_gateway.workers.host import main, serve

__all__ = ["main", "serve"]

if __name__ == "__main__":
    raise SystemExit(main())
