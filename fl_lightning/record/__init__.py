"""A run's record while it runs: metrics.csv, and the metrics that are shown."""
