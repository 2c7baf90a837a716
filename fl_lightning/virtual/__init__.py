"""Simulated devices: how long clients take, who is there, and the order of events."""
