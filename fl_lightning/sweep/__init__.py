"""``fl-lightning sweep`` runs a grid of settings and seeds to its end, whatever interrupts it."""
