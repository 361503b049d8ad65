"""Plans of faults that the gateway carries out for its users."""
