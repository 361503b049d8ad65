"""The line between a driver and each process that it started: it resumes after a cut, and tells a cut from an end.

- `loom_gateway.driver.lifeline.line` is the sans-IO part of either end.
- `loom_gateway.driver.lifeline.introduction` has the ends prove to each other that they know the driver's key.
- `loom_gateway.driver.lifeline.server` is the driver's end.
- `loom_gateway.driver.lifeline.agent` is the other end: a small program beside each process.
- `loom_gateway.driver.lifeline.tie` makes the first connection in the process, and starts the agent.
- `loom_gateway.driver.lifeline.watchers` tells processes which other ones are gone, on connections of their own.
- `loom_gateway.driver.lifeline.watch` is the process's end of such a connection.
- `loom_gateway.driver.lifeline.host_watch` tells a lost worker host from a cut.
"""
