"""GRUs in other forms: files and source for other programs, and readers of theirs."""
