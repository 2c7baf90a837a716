"""What tests share: learners, federations in float64, comparisons, processes."""
