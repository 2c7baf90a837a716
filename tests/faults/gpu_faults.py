"""Faults that only a GPU shows, here a make-believe one (tests/engines/test_gpu.py)."""

from __future__ import annotations

from tests.faults.faults_list import Fault

OPTIMIZER = "fl_lightning/client/client_optimizer.py"
CAPTURE = "fl_lightning/engines/fast/capture.py"
SUM = "fl_lightning/aggregation/over_processes.py"
MEMORY = "fl_lightning/machine/device_memory.py"

GPU_FAULTS = [
    Fault(
        "on a GPU: sums over processes are sent from where they lie",
        [(SUM, "value.to(device).reshape(-1)", "value.reshape(-1)")],
    ),
    Fault(
        "on a GPU: all sums over processes stay on the device that sent them",
        [(SUM, "part.view(shape).to(home, copy=True)", "part.view(shape).clone()")],
    ),
    Fault(
        "on a GPU: a kept optimizer state stays on the CPU",
        [(OPTIMIZER, "value.to(self._home(target, name, options), copy=True)", "value.clone()")],
    ),
    Fault(
        "on a GPU: a kept step count that no kernel reads is moved to it",
        [(OPTIMIZER, 'read = name != "step" or', "read = True or")],
    ),
    Fault(
        "on a GPU: Adam's steps cannot be recorded",
        [(OPTIMIZER, '{"capturable": True} if fits and same else {}', "{}")],
    ),
    Fault(
        "on a GPU: no step is measured before the workers are counted",
        [("fl_lightning/engines/registry.py", "if on_cpu or measure_step(self.copies)", "if True")],
    ),
    Fault(
        "on a GPU: rows of methods take no memory",
        [("fl_lightning/engines/engine_context.py", "one += sum(", "sum(")],
    ),
    Fault(
        "on a GPU: the first client makes a server state that others read",
        [
            (
                "fl_lightning/loop.py",
                "transaction.make_server_states(self.methods.declared)",
                "pass",
            )
        ],
    ),
    Fault(
        "on a GPU: a worker's stream does not wait for the caller's",
        [
            (
                "fl_lightning/client/client_trainer.py",
                "self.stream.wait_stream(torch.cuda.current_stream())",
                "pass",
            )
        ],
    ),
    Fault(
        "on a GPU: the caller does not wait for a worker's stream",
        [
            (
                "fl_lightning/engines/fast/gpu_streams.py",
                "torch.cuda.current_stream().wait_stream(worker.stream)",
                "pass",
            )
        ],
    ),
    Fault(
        "on a GPU: each recording takes memory of its own",
        [
            (
                CAPTURE,
                "self._pool = self._pool or Pool(self.stream)",
                "self._pool = Pool(self.stream)",
            )
        ],
    ),
    Fault(
        "on a GPU: a read of a value reaches CUDA within a capture",
        [(CAPTURE, "with without_waits():", "with suppress():")],
    ),
    Fault(
        "on a GPU: a step is not watched before it is captured",
        [(CAPTURE, "        return Refusing()", "        return suppress()")],
    ),
    Fault(
        "on a GPU: a recording that fails puts w's own bits back",
        [
            (
                CAPTURE,
                "if self.stream is None:  # recording a graph",
                "if True:  # recording a graph",
            )
        ],
    ),
    Fault(
        "on a GPU: pinned memory is kept for rows",
        [(MEMORY, "row.clone() for key, row in pinned", "row for key, row in pinned")],
    ),
    Fault(
        "on a GPU: convolutions round their inputs to ten bits",
        [(MEMORY, "torch.backends.cudnn.allow_tf32 = False", "pass")],
    ),
    Fault(
        "on a GPU: staged rows stay on the CPU",
        [
            (
                "fl_lightning/round/server.py",
                "to_device(row, device).unsqueeze(0)",
                "row.unsqueeze(0)",
            )
        ],
    ),
    Fault(
        "on a GPU: each logged number waits for it",
        [
            (
                "fl_lightning/client/flat_learner.py",
                "torch.full((), float(value), device=self.x.device)",
                "torch.tensor(float(value), device=self.x.device)",
            )
        ],
    ),
    Fault(
        "on a GPU: each accumulated batch waits for it",
        [
            (
                "fl_lightning/client/gradient_accumulation.py",
                "torch.full((), number, dtype=torch.float64, device=device)",
                "torch.tensor(number, dtype=torch.float64, device=device)",
            )
        ],
    ),
    Fault(
        "on a GPU: each evaluated batch waits for it",
        [
            (
                "fl_lightning/evaluation/evaluator.py",
                "torch.full((), number, dtype=torch.int64, device=loss.device)",
                "torch.tensor(number, dtype=torch.int64, device=loss.device)",
            )
        ],
    ),
    Fault(
        "on a GPU: HetLoRA moves its places in each step",
        [
            (
                "callbacks/adapters/padded_ranks.py",
                "place = self.place[clients]\n",
                "place = low_rank.numbers(clients.layout).to(x.device)\n",
            )
        ],
    ),
    Fault(
        "on a GPU: an NCCL timeout aborts the process",
        [
            (
                "fl_lightning/machine/federated_strategy.py",
                '("TORCH_NCCL_BLOCKING_WAIT", "1")',
                '("NO", "1")',
            )
        ],
    ),
    Fault(
        "on a GPU: a client's own value of a metric is sent as a CUDA tensor",
        [
            (
                "fl_lightning/aggregation/metric_states.py",
                "values[name] = value.to(device or value.device)",
                "values[name] = value",
            )
        ],
    ),
]
