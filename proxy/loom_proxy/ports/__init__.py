"""Ports: where actors send messages to a program outside the cluster."""
