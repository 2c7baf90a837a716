"""Why some mutants cannot be caught."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def _equal(file: str, line: str, reason: str, *mutations: str) -> dict[tuple[str, str, str], str]:
    path = file
    if not file.endswith(".py"):
        (found,) = ROOT.glob(f"callbacks/*/{file}.py")
        path = found.relative_to(ROOT).as_posix()
    return {(path, line, mutation): reason for mutation in mutations}


WORK = "return (k - rho * (1 - rho**k) / (1 - rho)) / (1 - rho)"
QUOTIENT = "(k - rho * (1 - rho ** k) / (1 - rho)) / (1 - rho)"
SURVIVORS = {
    **_equal(
        "fl_lightning/aggregation/update_accumulator.py",
        "group.drop_scratch()",
        "equivalent but larger: scratch rows are held until the client's sum is",
        "left out: group.drop_scratch() (column 0)",
    ),
    **_equal(
        "alternating_head",
        "self.of_head[clients] = head.to(clients.x.device)",
        "equivalent: 2 is True in a mask",
        "factor: self.of_head[clients] = head.to(clients.x.device) (column 0)",
    ),
    **_equal(
        "fl_lightning/round/cohort.py",
        'if self.n >= len(there) and self.sampling == "uniform":',
        "equivalent but slower: all that are there are drawn, and told by their number",
        "boundary: self.n >= len(there) (column 3)",
        "turned: self.sampling == 'uniform' (column 28)",
    ),
    **_equal(
        "fl_lightning/round/cohort.py",
        "if n >= len(there):",
        "equivalent but slower: all are chosen",
        "boundary: n >= len(there) (column 3)",
    ),
    **_equal(
        "fl_lightning/round/cohort.py",
        "if steps is None and self.local_epochs is not None and self.local_epochs < 1:",
        "equivalent but slower: of one epoch, the steps of each client are an epoch",
        "boundary: self.local_epochs < 1 (column 55)",
    ),
    **_equal(
        "robust_aggregation",
        "return away.sort(1).values[:, : len(u) - f - 2].sum(1)",
        "equivalent: a score is compared with others over as many distances",
        "mean instead: away.sort(1).values[:, :len(u) - f - 2].sum(1) (column 7)",
    ),
    **_equal(
        "robust_aggregation",
        "z = u.mean(0)",
        "equivalent to the iteration's tolerance: where it starts",
        "sum instead: u.mean(0) (column 4)",
    ),
    **_equal(
        "differential_privacy",
        "c = limit * (1 - 64 * torch.finfo(torch.float64).eps)",
        "equivalent: a margin for rounding, twice as wide",
        "factor: twice the right of 1 - 64 * torch.finfo(torch.float64).eps (column 13)",
    ),
    **_equal(
        "differential_privacy",
        "trainer.should_stop |= spent > self.target_epsilon",
        "equivalent: 2 is true",
        "factor: trainer.should_stop |= spent > self.target_epsilon (column 0)",
    ),
    **_equal(
        "consensus_distance_logger",
        "moved = (clients.x - clients.current_w).double()",
        "equivalent: the spread around the mean does not depend on where the origin is",
        "sign: clients.x - clients.current_w (column 9)",
        "left operand alone: clients.x - clients.current_w (column 9)",
        "factor: twice the right of clients.x - clients.current_w (column 9)",
    ),
    **_equal(
        "global_sharpness_aware_minimization",
        "self.dual[clients] = mu_i if self.ignore_last else mu_i - self.last[clients]",
        "equivalent: U is brought to length r, so its scale does not matter",
        "factor: self.dual[clients] = mu_i if self.ignore_last else mu_i - self.last[clients] "
        "(column 0)",
    ),
    **_equal(
        "global_sharpness_aware_minimization",
        "mean = self.dual.mean()",
        "equivalent: U is brought to length r, so its scale does not matter",
        "sum instead: self.dual.mean() (column 7)",
    ),
    **_equal(
        "normalized_averaging",
        WORK,
        "equivalent: a factor that all τ_i share cancels in (Σ p τ) Σ p u/τ",
        f"sign: {QUOTIENT} (column 7)",
        f"left operand alone: {QUOTIENT} (column 7)",
        "sign: 1 - rho (column 47)",
        "left operand alone: 1 - rho (column 47)",
        "factor: twice the right of 1 - rho (column 47)",
    ),
    **_equal(
        "fl_lightning/schedules.py",
        "if round >= self.rounds:",
        "equivalent: half a cosine ends at its end",
        "boundary: round >= self.rounds (column 3)",
    ),
    **_equal(
        "fl_lightning/round/client_group.py",
        "self._keep(key, declaration, one.new_empty(len(self.ids), *one.shape))",
        "equivalent but slower: zeros are made, and then overwritten",
        "left out: self._keep(key, declaration, one.new_empty(len(self.ids), *one.shape)) "
        "(column 0)",
    ),
    **_equal(
        "fl_lightning/round/client_group.py",
        "if self.kept_mask is not None and self.kept_origin is not None:",
        "equivalent: both are there, or neither",
        "and ↔ or: self.kept_mask is not None and self.kept_origin is not None (column 3)",
    ),
    **_equal(
        "fl_lightning/aggregation/over_processes.py",
        "return leaves if len(leaves) < 2 else visit(leaves[0::2]) + visit(leaves[1::2])",
        "equivalent: two leaves are in order either way",
        "boundary: len(leaves) < 2 (column 17)",
    ),
    **_equal(
        "fl_lightning/aggregation/over_processes.py",
        "while leaf >= stride or leaf + stride < self.n:",
        "equivalent: a level more, on which the leaf has no sibling",
        "boundary: leaf + stride < self.n (column 24)",
    ),
    **_equal(
        "fl_lightning/aggregation/over_processes.py",
        "if sibling < self.n:",
        "equivalent: from that stride on, a sibling is always one of the n",
        "boundary: sibling < self.n (column 3)",
    ),
    **_equal(
        "fl_lightning/storage/client_rows.py",
        "if client % self.world == self.rank and trainer != self.rank:",
        "equivalent but slower: rows that stay here are packed, and rows of others are not in "
        "this store",
        "and ↔ or: client % self.world == self.rank and trainer != self.rank (column 3)",
    ),
    **{
        ("fl_lightning/client/client_trainer.py", line, f"left out: {line} (column 0)"): (
            "not equivalent: a GPU alone can tell it (gpu-check)"
        )
        for line in (
            "self._context = torch.cuda.stream(self.stream)",
            "self._context.__enter__()",
            "self._context.__exit__(*failure)",
        )
    },
    **_equal(
        "datamodules/partitions/partition.py",
        "small = quota < 1 - 1e-9",
        "equivalent: no share is 1 - 1e-9 to the last bit",
        "boundary: quota < 1 - 1e-09 (column 8)",
    ),
    **_equal(
        "datamodules/partitions/partition.py",
        "sizes = np.floor(quota + 1e-9).astype(np.int64)",
        "equivalent: what it rounds down has the largest remainder, and is rounded up again",
        "sign: quota + 1e-09 (column 17)",
    ),
    **_equal(
        "datamodules/partitions/label_skew.py",
        "if q.sum() > 0:",
        "equivalent: a mean is above 0 where the sum is",
        "mean instead: q.sum() (column 3)",
    ),
    **_equal(
        "fl_lightning/loop.py",
        "server.update = torch.zeros_like(server.w)",
        "equivalent: where the server takes no step, no coordinate keeps anything of it",
        "left out: server.update = torch.zeros_like(server.w) (column 0)",
    ),
    **_equal(
        "fl_lightning/loop.py",
        "transaction.rows = {}",
        "equivalent, but memory is given back later",
        "left out: transaction.rows = {} (column 0)",
    ),
    **_equal(
        "fl_lightning/loop.py",
        "self.state.rows.fetch(ids)",
        "one process has nothing to fetch; two are tested in storage/test_rows and test_resume",
        "left out: self.state.rows.fetch(ids) (column 0)",
    ),
}
"""(file, right line, mutation) -> why no test can, or need, tell it from the right one."""
