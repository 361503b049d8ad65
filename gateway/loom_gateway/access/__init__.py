"""Who may do what: tokens, scopes, rate limits and the audit log."""
