"""Models in files of other tools, put into integers in place."""
