"""What looks after a job: its replica groups, their slots, the lighthouse and the job's events."""
