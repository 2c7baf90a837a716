"""``fl-lightning sweep``: a grid of settings and seeds, run to its end however often it is interrupted."""
