"""Plans in other forms: files and source code that run without PyTorch."""
