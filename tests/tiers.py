"""Which tests are `make test`, the fast tier, and which only `make test-all` runs.

A test is of the whole tier if it is marked ``slow``: it starts real processes, or trains for
seconds. TIERS says what differs from that; of two entries the longer one holds. An entry is the
beginning of a test's id: a folder, a file, a test, or a test with its first parameters. A new
method gets its contracts, its oracle's second engine and its row of every engine in the whole
tier, without an entry.
"""

from __future__ import annotations

FAST, WHOLE = "fast", "whole"
CONTRACT = "tests/contracts/test_contracts.py::test_our_methods_keep_the_contracts"
ORACLE = "tests/callbacks/test_oracle_agreement.py::test_method_agrees_with_the_oracle"

# Between them these methods have every hook of a local step, every kind of declared state, parts,
# coding, selection and what is broadcast.
CONTRACTS_OF = [
    "AlternatingHead",
    "ClusteredModels",
    "ControlVariates",
    "LowRankUpdate",
    "MixedAscent",
    "ModelContrast",
    "PowerOfChoice",
    "QuantizedBroadcast",
]

TIERS = {
    # every method, and every pair of methods
    CONTRACT: WHOLE,
    **{f"{CONTRACT}[{name}-": FAST for name in CONTRACTS_OF},
    f"{ORACLE}[samples-": WHOLE,  # the second engine
    "tests/engines/test_every_method.py": WHOLE,
}


def tier(test: str, slow: bool) -> str:
    """The tier of a test by its id.

    >>> tier("tests/engines/test_every_method.py::test_x", slow=False)
    'whole'
    >>> [tier("tests/test_loop.py::test_x", slow) for slow in (False, True)]
    ['fast', 'whole']
    """
    matching = [place for place in TIERS if test.startswith(place)]
    if not matching:
        return WHOLE if slow else FAST
    return TIERS[max(matching, key=len)]
