"""The handlers of the driver, one for each kind of message."""
