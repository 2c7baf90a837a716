"""The longer notes below the tables of a report."""

from __future__ import annotations

CLAIMS = (
    "Reproduced: the interval excludes 0 in the claimed direction, p after Holm's correction "
    "within the claim's family is below 0.05, and the mean is at least the margin. "
    "Contradicted: the interval lies on the other side of 0, and p after Holm's correction is "
    "below 0.05. No margin applies here. "
    "Not reproduced: the interval's upper end, counted in the claimed direction, is below the "
    "margin. "
    "Inconclusive: all other cases, and always if there are fewer than five pairs, or if a seed "
    "that is left out because its run has lost would speak against the verdict. "
    "Equivalence (≈) is tested by two one-sided tests against ± margin, which correspond to the "
    "90 % interval: p before Holm's correction is below 0.05 if this interval lies within "
    "± margin. Equivalence is reproduced if p after Holm's correction is below 0.05, and "
    "contradicted if the 95 % interval lies outside ± margin. "
    "Divergence is reproduced if the claim holds in every seed. It needs at least three seeds. "
    "Provisional: some runs of the claim's family are missing. "
    "These runs say nothing about a number that was published for another network, other data or "
    "another number of rounds."
)
GAINS = (
    "If the claim is about a ratio, both differences are logarithms of ratios. Our difference "
    "uses the claim's score, in a setting that differs from the paper's. A table below lists what "
    "differs. The published difference is computed from the numbers that the paper printed. They "
    "are not paired by seed, so it has no such interval. You can compare signs and sizes, but you "
    "cannot test them."
)
PAIRS = (
    "Each difference is between two runs with the same seed, and so with the same partition. "
    "Intervals and p come from Student's t, two-sided. In a row with a 90 % interval, p comes "
    "from the two one-sided tests of an equivalence. The last column is p after Holm's step-down "
    "correction"
)
TARGETS = (
    "A run reaches the target in the first round in which its smoothed curve is {sign} {target}. "
    "Means are over the seeds that reached it, so an arm looks better than it is if some of its "
    "seeds never did. Bytes are counted from the messages, in both directions. Papers count one "
    "vector per client and round, and two for SCAFFOLD, FedCM, MoFedSAM, FedGamma and FedSMOO. "
    "FedALS counts the parameters that are sent in one direction."
)
BUDGETS = (
    "The head of each column is its budget: the total cost of the run that spent least. Every run "
    "is scored by its mean over the last third of this budget. Rounds after the budget was "
    "spent do not count."
)
RUNS = (
    " Runs: how many of the arm's runs have a value. If some have none, because they have lost or "
    "were not measured, the arm is never marked as the best."
)
PROCESSOR_SECONDS = (
    " Seconds are processor seconds of all threads and processes (time/cpu). Other work on the "
    "machine still lengthens them. Runs on a GPU have wall-clock seconds instead, if they did not "
    "overlap in time."
)
COMMUNICATION = (
    "Sent: the bytes of all messages in both directions, without buffers. Papers count FedCM and "
    "MoFedSAM twice. But only what the server sends doubles, so these methods send 1.5 times as "
    "much as FedAvg."
)
FAIRNESS = (
    "Each client is measured on its own test samples after the last round. Numbers are the mean "
    "± sample standard deviation over seeds. Worst and best 10 %: the mean over the worst and "
    "over the best tenth of the clients. If all clients have the same value, Jain's index is 1 "
    "and Gini is 0."
)
CHOSEN = (
    "Each candidate was trained with other seeds, for the number of rounds of the selection. It "
    "was scored on {samples}. If the chosen value is at an end of "
    "the tried values, a better value may lie beyond that end."
)
HELD_OUT = "training data that it was not trained on"
CLIENTS_TEST = f"the clients' test samples by clients/… and domains/…, by others on {HELD_OUT}"
