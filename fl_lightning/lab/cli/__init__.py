"""The command line. Nothing is imported here, because importing ``cli`` takes seconds and
``compose`` does not.
"""
