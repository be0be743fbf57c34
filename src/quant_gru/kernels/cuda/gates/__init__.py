"""Gate arithmetic: the constants of a plan, and the device code that uses them."""
