"""What a run tells its reader as it goes: metrics.csv, and which metrics it is shown by."""
