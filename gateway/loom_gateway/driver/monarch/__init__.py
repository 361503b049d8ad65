"""Every use of Monarch by the driver, private names included."""
