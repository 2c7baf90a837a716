"""Methods that look for flat minima."""
