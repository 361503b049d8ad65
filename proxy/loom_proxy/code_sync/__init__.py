"""Sending a project's folder to every host, and later only what has changed in it."""
