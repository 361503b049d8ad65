"""Looks into training processes: the stacks of their threads, and where their time goes."""
