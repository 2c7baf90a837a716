"""Two checkouts of this repository, compared in what they compute, how fast, and in how much
memory."""
