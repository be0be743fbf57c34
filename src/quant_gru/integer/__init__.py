"""The definition of the integer GRU: quantizers, plan, tables and the cell."""
