"""What leaves the library: parameter files and, from them, other formats."""
