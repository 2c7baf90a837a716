"""Simulated devices: durations of clients' work, who is present, and the order of events."""
