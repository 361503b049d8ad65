"""Proxies of Monarch's host, proc and actor meshes."""
