"""Configs of fl_lightning."""

if __name__ == "configs":
    raise ImportError("this is fl_lightning.configs: import it by that name")
