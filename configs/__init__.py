"""The packaged configs: ``fl-lightning configs`` lists them, ``-c NAME`` takes one."""

if __name__ == "configs":
    raise ImportError("this is fl_lightning.configs: import it by that name")
