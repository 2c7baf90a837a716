"""Methods that change a client's loss."""
