"""Which client has which training samples."""
