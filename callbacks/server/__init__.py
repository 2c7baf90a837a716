"""Methods that change the server's step."""
