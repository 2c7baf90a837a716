"""Speed, measured beside a bare PyTorch loop and other systems: ``python -m benchmarks.speed``."""
