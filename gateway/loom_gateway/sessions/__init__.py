"""Sessions and their driver processes: started, found again, drained and ended."""
