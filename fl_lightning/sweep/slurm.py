"""A sweep on a cluster: one SLURM array job, a task a run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from fl_lightning.sweep.grid import Run

_SCRIPT = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --output={out}/slurm-%A_%a.log
# Time, partition, cores and GPUs are your cluster's: add them here, or give them to sbatch.
# Submit it in the folder where it was written.
# A task that is requeued goes on from its last checkpoint.
runs=(
{runs}
)
exec {command} --run "${{runs[$SLURM_ARRAY_TASK_ID]}}"
"""


def script(name: str, out: str, command: Sequence[str], runs: Sequence[Run]) -> str:
    """Write the text of the script.

    Args:
        name: of the job.
        out: folder of the sweep.
        command: ``fl-lightning sweep FILE …``, to which ``--run PLACE`` is added.
        runs: that are still to be done.
    """
    return _SCRIPT.format(
        name=shlex.quote(name),
        out=out,
        last=len(runs) - 1,
        runs="\n".join(f"  {shlex.quote(run.place)}" for run in runs),
        command=shlex.join(command),
    )
