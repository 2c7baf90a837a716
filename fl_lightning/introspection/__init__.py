"""What objects say of themselves: arguments that they were made with, hooks' source, papers."""
