"""What tells about a split: hash, table, picture and measures."""
