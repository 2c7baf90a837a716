"""``fl-lightning analyse``: curvature and loss landscape of a run's model."""
