"""``fl-lightning sweep`` runs a grid of settings and seeds to its end, and continues after
interruptions.
"""
