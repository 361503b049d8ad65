"""Access control: tokens, scopes, rate limits and the audit log."""
