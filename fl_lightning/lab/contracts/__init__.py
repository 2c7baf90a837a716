"""The contracts of every method, whatever its rule: small runs and rehearsed hooks, for
``testing``.
"""
