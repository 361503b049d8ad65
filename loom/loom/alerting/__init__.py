"""Alerts: rules about a user's runs, and what is sent when one holds.

`loom.alerting.alerts` decides and keeps, in the weaver's commits. `loom.alerting.deliveries` sends, by a process
for each attempt (`loom.alerting.send`), which outlives the weaver.
"""
