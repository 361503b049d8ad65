"""The line between a driver and each process that it started: it resumes after a cut, and tells a cut from an end.

- `loom_gateway.driver.process_link.link` is the sans-IO part of either end, which first proves that it knows the
  driver's key.
- `loom_gateway.driver.process_link.server` is the driver's end.
- `loom_gateway.driver.process_link.agent` is the other end: a small program beside each process.
- `loom_gateway.driver.process_link.join` makes the first connection in the process, and starts the agent.
- `loom_gateway.driver.process_link.deaths` tells processes which others are gone, on connections of their own.
- `loom_gateway.driver.handlers.hosts` tells a lost worker host from a cut.
"""
