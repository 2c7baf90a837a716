"""Attacks, robust averages, and privacy."""
