"""Methods for low-rank adapters."""
