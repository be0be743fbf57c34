"""From real values to codes and back."""
