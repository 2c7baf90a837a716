"""The tests: a folder and a file each for those of the source, and what they share in helpers."""
