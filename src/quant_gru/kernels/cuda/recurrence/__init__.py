"""The recurrence, step after step: persistent, in launches of a step, and of wide integers."""
