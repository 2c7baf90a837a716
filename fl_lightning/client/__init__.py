"""What one client does in a round: its steps, optimizer, hooks and logs."""
