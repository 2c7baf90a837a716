"""What is refused or noted before training starts."""
