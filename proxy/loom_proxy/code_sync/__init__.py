"""Shipping a project's folder to every host, and later only its changes."""
