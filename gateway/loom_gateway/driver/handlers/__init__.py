"""What the driver does for each kind of message."""
