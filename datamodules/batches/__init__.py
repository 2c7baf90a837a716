"""From a client's samples to its batches."""
