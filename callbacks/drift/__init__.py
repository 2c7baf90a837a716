"""Methods that correct the drift of clients."""
