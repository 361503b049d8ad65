"""Worker hosts: how the gateway finds them, and the process that each of them runs."""
