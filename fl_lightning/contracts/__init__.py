"""What every method keeps, whatever its rule: small runs and rehearsed hooks, for ``testing``."""
