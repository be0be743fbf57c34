"""From real data to scales: traces, observers and the search for quantizers."""
