"""Contexts: gateways that the user has named, each with its own token; and the choice of the gateway to ask."""
