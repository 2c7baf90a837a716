"""Methods that give clients models of their own."""
