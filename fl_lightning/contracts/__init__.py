"""What every method has to keep, whatever its rule: small runs and rehearsed hooks behind ``fl_lightning.testing``."""
