"""Methods that choose who takes part and what is sent."""
