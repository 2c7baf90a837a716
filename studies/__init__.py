"""The replication of papers: settings, protocol, runs and results. See README.md."""
