"""The command line. Nothing is imported here: ``compose`` stays light, ``cli`` takes seconds."""
