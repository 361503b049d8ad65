"""What people see: notebook tables and the progress of long waits."""
