"""Datamodules of fl_lightning."""

if __name__ == "datamodules":
    raise ImportError("this is fl_lightning.datamodules: import it by that name")
