"""Methods that change the direction of a local step."""
