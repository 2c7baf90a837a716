"""What is around runs: the command line, sweeps, reports, analyses, and the check of a method."""
