"""Data sets and readers of files, one class that users name per file."""
