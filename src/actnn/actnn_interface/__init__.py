"""The names of ActNN's notes: QModule, config, levels, schemes and operations, on this package."""
