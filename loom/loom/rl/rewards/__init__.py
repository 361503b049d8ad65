"""Rewards: functions in the forms of TRL and of verifiers, which judge completions in processes of their own."""
