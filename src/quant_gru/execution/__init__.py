"""What happens in a call: shapes, plans that follow weights, layers and directions."""
