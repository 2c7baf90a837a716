"""Measurements and displays."""
