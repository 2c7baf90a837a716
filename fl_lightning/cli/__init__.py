"""The command line. Nothing is imported here: ``compose`` has to stay light, ``cli`` takes seconds."""
