"""Where precision is lost, and what to do about it."""
