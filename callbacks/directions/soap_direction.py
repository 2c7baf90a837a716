"""Local SOAP, and FedPAC's SOAP variant: Adam in the eigenbasis of Shampoo's preconditioner.

N. Vyas, D. Morwani, R. Zhao, M. Kwun, I. Shapira, D. Brandfonbrener, L. Janson, S. Kakade: SOAP:
Improving and Stabilizing Shampoo using Adam (ICLR 2025), arXiv:2409.11321. J. Liu, F. Shang, H.
Liu, J. Liu, W. An, Y. Liu: Taming Preconditioner Drift (2026), arXiv:2602.19271 (FedPAC). The rule
is that of FedPAC's code; the terms with c are ours, without which rounding chooses the basis of a
null space.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.callback import (
    BelowOne,
    Clients,
    FederatedCallback,
    Layout,
    Paper,
    PositiveFloat,
    PositiveInt,
    Scratch,
    Server,
    ServerState,
    Upload,
    UserError,
)

LEAST = 1e-4  # c is so many times the mean eigenvalue


class SoapDirection(FederatedCallback):
    """Each dimension j of a tensor has G_j ← β_s G_j + (1 - β_s) g_(j) g_(j)ᵀ, and its eigenbasis
    Q_j.

    g_(j) is the gradient unfolded along j. In the tensors' eigenbases steps are Adam's; the
    direction is √(1 - β2^k)/(1 - β1^k) m/(√v + ε), turned back. The first step of a round only
    computes Q, and has direction 0; then every ``frequency`` steps Q_j ← QR((G_j + c I) Q_j).
    Tensors of less than two dimensions, those that ``exclude`` names, and dimensions above
    ``max_dim`` are not turned. Moments start each round at 0.
    Sent: with ``start="averaged"`` G up, and its mean down. Kept by each client: nothing.

    Args:
        betas: β1, β2.
        shampoo_beta: β_s.
        epsilon: ε.
        frequency: f, from 1.
        start: G at the start of a round: ``"zeros"``, or ``"averaged"``: the uniform mean of the
            last participants'.
        max_dim: dimensions with more entries have no matrix.
        exclude: patterns of names (``fnmatch``) of parameters that are not turned, or ``"last"``.

    Raises:
        UserError: a value is not accepted; a pattern matches nothing; the client optimizer is not
            plain SGD; with ``start="averaged"`` no tensor has a matrix, or parts are not averaged.

    Example:
        the first step of a round has direction 0.

        >>> from fl_lightning.callbacks import SoapDirection
        >>> from fl_lightning.testing import tiny_run
        >>> import torch
        >>> plain = {"local_steps": 1, "client_optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
        >>> one, two = (tiny_run(SoapDirection(), rounds=t, **plain) for t in (1, 2))
        >>> one.global_vector.equal(two.global_vector)
        True
    """

    title = "Local SOAP"
    paper = Paper(
        by=lambda given: [
            "vyas2025soap",
            "liu2026fedpac" if given.get("start") == "averaged" else None,
        ],
    )
    moves_start = False
    reads_values = True  # which steps decompose the matrices
    of_coordinates = ("K",)
    m = Scratch()
    v = Scratch()
    g = Scratch(shape=("K",))  # all G_j, one after the other
    q = Scratch(shape=("K",))  # all Q_j
    K = 1

    def __init__(
        self,
        betas: tuple[BelowOne, BelowOne] = (0.95, 0.95),
        shampoo_beta: BelowOne = 0.95,
        epsilon: PositiveFloat = 1e-8,
        frequency: PositiveInt = 10,
        start: Literal["zeros", "averaged"] = "zeros",
        max_dim: PositiveInt = 10000,
        exclude: str | Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.betas = (float(betas[0]), float(betas[1]))
        self.shampoo_beta = shampoo_beta
        self.epsilon = epsilon
        self.frequency = frequency
        self.start = start
        self.max_dim = max_dim
        self.exclude = [exclude] if isinstance(exclude, str) else list(exclude)
        vars(self)["tolerates_staleness"] = start == "zeros"
        if start == "averaged":
            # A title belongs to the class, but this one depends on the arguments.
            vars(self)["title"] = "SOAP, averaged"
            self.cannot_run_with = {"parts": "the mean of matrices of kept parts is undefined"}
            self.declare("G", ServerState(shape=("K",), sent=True, synchronised=False))
            self.declare("sent", Upload(shape=("K",)))

    def on_layout(self, layout: Layout) -> None:
        excluded = layout.named(self.exclude, "SoapDirection: exclude") if self.exclude else []
        self.turned: dict[str, list[tuple[int, int, slice]]] = {}
        begin = 0
        for name, (_, shape) in layout.items():
            self.turned[name] = []
            for j, size in enumerate(shape):
                if len(shape) > 1 and name not in excluded and size <= self.max_dim:
                    place = slice(begin, begin + size * size)
                    self.turned[name].append((j + 1, size, place))
                    begin = place.stop
        if self.start == "averaged" and not begin:
            raise UserError(
                "SoapDirection: start='averaged' shares matrices, and no parameter has one. Use "
                "start='zeros', another exclude or a larger max_dim."
            )
        self.K = max(1, begin)

    def on_local_start(self, clients: Clients) -> None:
        if self.start == "averaged":
            self.g[clients] = self.G

    def precondition(self, clients: Clients, gradient: Tensor) -> Tensor:
        k = int(clients.step)
        # A decomposition refuses numbers that are not finite, and the run has to name the client.
        # If the sum of squares is finite, so are the matrices.
        finite = gradient.square().sum(1, keepdim=True).isfinite()
        gradient = torch.where(finite, gradient, 0.0)
        direction = torch.zeros_like(gradient)
        for where, shape, turned in self._tensors(clients.layout):
            g = gradient[:, where].reshape(-1, *shape)
            if k:
                step = self._adam(clients, g, where, turned, k)
                direction[:, where] = step.reshape(len(step), -1)
            self._follow(clients, g, where, turned, k)
        return torch.where(finite, direction, torch.nan)

    def _tensors(
        self, layout: Layout
    ) -> Iterator[tuple[slice, torch.Size, list[tuple[int, int, slice]]]]:
        for name, (where, shape) in layout.items():
            yield where, shape, self.turned[name]

    def _adam(
        self,
        clients: Clients,
        g: Tensor,
        where: slice,
        turned: list[tuple[int, int, slice]],
        k: int,
    ) -> Tensor:
        """Return the direction ``(n, *shape)`` of step k from 1, after the moments' update."""
        beta1, beta2 = self.betas
        m = self.m[clients][:, where].view_as(g)
        v = self.v[clients][:, where].view_as(g)
        # m is kept in plain coordinates, and v in those of the eigenbases.
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        q = self.q[clients]
        inside, along = g, m
        for j, size, place in turned:
            basis = q[:, place].reshape(-1, size, size)
            inside, along = times(inside, basis.mT, j), times(along, basis.mT, j)
        v.mul_(beta2).addcmul_(inside, inside, value=1 - beta2)
        rate = math.sqrt(1 - beta2**k) / (1 - beta1**k)
        step = rate * along / (v.sqrt() + self.epsilon)
        for j, size, place in turned:
            step = times(step, q[:, place].reshape(-1, size, size), j)
        return step

    def _follow(
        self,
        clients: Clients,
        g: Tensor,
        where: slice,
        turned: list[tuple[int, int, slice]],
        k: int,
    ) -> None:
        """Update G and, if it is time, Q and the order of v."""
        for j, size, place in turned:
            matrix = self.g[clients][:, place].view(-1, size, size)
            unfolded = g.movedim(j, 1).reshape(len(g), size, -1)
            square = unfolded @ unfolded.mT
            matrix.mul_(self.shampoo_beta).add_(square, alpha=1 - self.shampoo_beta)
            basis = self.q[clients][:, place].view(-1, size, size)
            if k == 0:
                basis.copy_(eigenbasis(matrix))
            elif k % self.frequency == 0:
                v = self.v[clients][:, where].view_as(g)
                refined, order = refine(matrix, basis)
                basis.copy_(refined)
                rows = order.view(len(g), *(size if d == j else 1 for d in range(1, g.dim())))
                v.copy_(v.gather(j, rows.expand_as(v)))

    def on_local_end(self, clients: Clients) -> None:
        if self.start == "averaged":
            self.sent[clients] = self.g[clients]

    def on_server_update(self, server: Server) -> None:
        if self.start == "averaged" and server.n:
            self.G = self.sent.mean()


def times(tensor: Tensor, matrix: Tensor, j: int) -> Tensor:
    """Return the tensors ``(n, …)`` with dimension j multiplied by the matrices ``(n, a, d_j)``."""
    moved = tensor.movedim(j, 1)
    product = matrix @ moved.reshape(len(tensor), moved.shape[1], -1)
    return product.view(len(tensor), -1, *moved.shape[2:]).movedim(1, j)


def least(matrix: Tensor) -> Tensor:
    """Return c of matrices ``(n, d, d)``: ``(n, 1)``."""
    trace = matrix.diagonal(dim1=1, dim2=2).sum(1, keepdim=True)
    return LEAST * trace / matrix.shape[1]


def eigenbasis(matrix: Tensor) -> Tensor:
    """Return eigenvectors ``(n, d, d)``, largest first.

    Those of eigenvalues up to c are replaced by the eigenvectors of P D P, largest first, where P
    projects on what the others leave, and D = diag(1, …, d)/d.
    """
    size = matrix.shape[1]
    wide = matrix.double()  # in float32 LAPACK gives NaN or fails where some rows are nearly 0
    values, vectors = (each.flip(-1) for each in torch.linalg.eigh(wide))
    kept = values > least(wide)
    number = kept.sum(1)[:, None, None]
    own = torch.where(kept[:, None, :], vectors, 0.0)
    left = torch.eye(size, dtype=wide.dtype, device=wide.device) - own @ own.mT
    weights = torch.arange(1, size + 1, dtype=wide.dtype, device=wide.device) / size
    others = torch.linalg.eigh(left * weights @ left)[1].flip(-1)
    # Column i is the i-th kept vector, or the (i - number)-th of the others.
    columns = torch.arange(size, device=wide.device).expand_as(others)
    chosen = others.gather(2, (columns - number).clamp(min=0))
    return torch.where(columns < number, vectors, chosen).to(matrix)


def refine(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return QR((G + c I) Q) of the sorted Q, and the order ``(n, d)`` in which it was sorted.

    Columns are sorted by qᵀ G q, largest first.
    """
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    q = basis.to(wide)
    order = ((wide @ q) * q).sum(1).argsort(dim=1, descending=True, stable=True)
    q = q.gather(2, order[:, None, :].expand_as(q))
    product = wide @ q + least(wide)[:, :, None] * q
    return torch.linalg.qr(product)[0].to(matrix), order
