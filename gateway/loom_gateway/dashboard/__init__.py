"""The web page: its files, and how a browser signs in to it. Its source is in ``gateway/dashboard``."""
