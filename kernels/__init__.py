"""Arrays and bytes: pure functions with a plain reference beside each. Knows nothing of sessions, models or files."""
