"""Gate arithmetic: what is fixed for a plan, and how it is computed."""
