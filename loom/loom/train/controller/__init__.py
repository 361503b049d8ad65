"""The control of a job: its replica groups, their slots, the lighthouse and the job's events."""
