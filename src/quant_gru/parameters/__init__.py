"""The parameter document of files and checkpoints."""
