"""Runs whose clients train where their data are."""
