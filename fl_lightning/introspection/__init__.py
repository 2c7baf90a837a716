"""What objects say of themselves: arguments made with, what these accept, hooks, papers."""
