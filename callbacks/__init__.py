"""Callbacks of fl_lightning."""

if __name__ == "callbacks":
    raise ImportError("this is fl_lightning.callbacks: import it by that name")
