"""Goodput: the share of the replicas' time that was spent on steps that count."""
