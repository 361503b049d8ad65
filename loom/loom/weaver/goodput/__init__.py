"""How much of the time that replicas had was spent on steps that count."""
