"""Methods without a server: clients mix models with their neighbours on a graph."""
