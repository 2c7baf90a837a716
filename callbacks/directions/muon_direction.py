"""Local Muon, FedMuon, FedPAC's Muon variant, and FedMuon-LMO: steps along orthogonalised momentum.

K. Jordan, Y. Jin, V. Boza, J. You, F. Cesista, L. Newhouse, J. Bernstein: Muon (2024). J. Liu, F.
Shang, J. Zhou, H. Liu, Y. Liu, J. Liu: FedMuon: Accelerating Federated Learning with Matrix
Orthogonalization (2025), arXiv:2510.27403. J. Liu, F. Shang, H. Liu, J. Liu, W. An, Y. Liu: Taming
Preconditioner Drift (2026), arXiv:2602.19271 (FedPAC). Y. Takezawa, A. Koloskova, X. Jiang, S. U.
Stich: FedMuon: Federated Learning with Bias-corrected LMO-based Optimization (ICLR 2026),
arXiv:2509.26337, another method of that name.
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
    ClientState,
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

# The polynomial of the Newton–Schulz iteration: a X + (b A + c A²) X, A = X Xᵀ.
QUINTIC = (3.4445, -4.7750, 2.0315)


class MuonDirection(FederatedCallback):
    """Matrices step along s c O(U): M ← μ M + (1 - μ) g, U = (1 - μ) g + μ M, or M.

    O sets the singular values of U to one. A parameter tensor of two or more dimensions is a
    matrix, shape[0] × the rest. All others, and those that ``exclude`` names, are vectors: they
    step as with AdamDirection and fresh moments, or along U/‖U‖ of each tensor. c is
    ``matrix_lr_scale``, s is √max(1, a/b), 0.2 √max(a, b) or 1. The client optimizer adds weight
    decay, which neither s nor c scales. M starts each round at 0, at the mean of the last
    participants' M, or at the client's own last M. With ``variates`` U = M - C_i + C; C_i is the M
    with which the client began the round, and C ← C + (1/m) Σ (M_{i,K} - C_i).
    Sent: nothing more with ``start="zeros"`` or ``"own"``; the mean of M down and M up; C down and
    M - C_i up. Kept: M by each client with ``"own"``.

    Args:
        momentum: μ, from 0 to below 1.
        nesterov: whether U looks ahead.
        start: ``"zeros"``, ``"averaged"`` or ``"own"``.
        variates: needs ``start="own"`` and ``nesterov=False``.
        average: with ``"all"`` d ← d n/m, as if clients that did not take part had not moved. It is
            refused together with DifferentialPrivacy, and with methods that take the products of
            adapters.
        vectors: ``"adam"`` or ``"unit"``.
        orthogonaliser: ``"newton_schulz"`` or ``"svd"``, which is exact.
        ns_steps: Newton–Schulz iterations, from 1.
        adjust: s: ``"original"``, ``"match_rms_adamw"`` or ``"none"``.
        matrix_lr_scale: c, above 0.
        exclude: patterns of names (``fnmatch``) of parameters that are treated as vectors, or
            ``"last"`` (layer).
        betas, epsilon: of Adam.

    Raises:
        UserError: variates with another start or nesterov; or a pattern matches nothing.

    Example:
        an orthogonalised matrix has singular values of 1.

        >>> import torch
        >>> from fl_lightning.callbacks.directions.muon_direction import by_svd
        >>> rotated = by_svd(torch.tensor([[[3.0, 0.0, 0.0], [0.0, -2.0, 0.0]]]))
        >>> rotated.tolist()
        [[[1.0, 0.0, 0.0], [0.0, -1.0, 0.0]]]
    """

    title = "Local Muon"
    paper = Paper(
        by=lambda given: [
            "jordan2024muon",
            "takezawa2025fedmuon" if given.get("variates") else None,
            *(["liu2025fedmuon", "liu2026fedpac"] if given.get("start") == "averaged" else []),
        ],
    )
    moves_start = False
    first = Scratch(shape=("V",))  # Adam's moments of vectors
    second = Scratch(shape=("V",))

    def __init__(
        self,
        momentum: BelowOne = 0.95,
        nesterov: bool = True,
        start: Literal["zeros", "averaged", "own"] = "zeros",
        variates: bool = False,
        average: Literal["participants", "all"] = "participants",
        vectors: Literal["adam", "unit"] = "adam",
        orthogonaliser: Literal["newton_schulz", "svd"] = "newton_schulz",
        ns_steps: PositiveInt = 5,
        adjust: Literal["original", "match_rms_adamw", "none"] = "original",
        matrix_lr_scale: PositiveFloat = 1.0,
        exclude: str | Sequence[str] = (),
        betas: tuple[BelowOne, BelowOne] = (0.9, 0.95),
        epsilon: PositiveFloat = 1e-10,
    ) -> None:
        super().__init__()
        if variates and (start != "own" or nesterov):
            raise UserError(
                "MuonDirection: variates=True corrects a momentum that each client keeps, but you "
                f"gave start={start!r} and nesterov={nesterov}. Set start='own' and "
                "nesterov=False."
            )
        self.momentum = momentum
        self.nesterov = nesterov
        self.start = start
        self.variates = variates
        self.average = average
        if average == "all":
            # The mean is scaled before other methods add to it, wherever they stand in the list.
            vars(self)["order"] = -1
        self.vectors = vectors
        self.orthogonaliser = orthogonaliser
        self.ns_steps = ns_steps
        self.adjust = adjust
        self.matrix_lr_scale = matrix_lr_scale
        self.exclude = [exclude] if isinstance(exclude, str) else list(exclude)
        self.betas = (float(betas[0]), float(betas[1]))
        self.epsilon = epsilon
        vars(self)["tolerates_staleness"] = start == "zeros" and average == "participants"
        if start != "zeros":
            self.cannot_run_with = {"parts": "the mean of a momentum of kept parts is undefined"}
        self._declare_momentum()

    def _declare_momentum(self) -> None:
        if self.start == "own":
            self.declare("M", ClientState(synchronised=False))
        else:
            self.declare("held", Scratch())
        if self.start == "averaged":
            vars(self)["title"] = "Muon, averaged momentum"
            self.declare("M", ServerState(sent=True, synchronised=False))
            self.declare("sent", Upload())
        if self.variates:
            vars(self)["title"] = "FedMuon-LMO"
            self.declare("C", ServerState(sent=True, synchronised=False))
            self.declare("begun", Scratch())  # C_i
            self.declare("sent", Upload())

    def on_layout(self, layout: Layout) -> None:
        # A pattern that matches nothing would leave a head or an embedding among the matrices.
        excluded = layout.named(self.exclude, "MuonDirection: exclude") if self.exclude else []
        of_vectors = []
        for name, (_, shape) in layout.items():
            if len(shape) < 2 or name in excluded:
                of_vectors.append(name)
        self.is_vector = {name: name in of_vectors for name in layout}
        mask = layout.mask(of_vectors)
        # The coordinates that are stepped as vectors; a state has at least one number.
        self.places = mask.nonzero()[:, 0]
        self.V = max(1, len(self.places))

    def not_beside(self, other: FederatedCallback) -> str:
        if self.average == "participants":
            return ""
        name = type(other).__name__
        if other.has("aggregate") and other.every_round:
            # Rounds without participants take a step, too.
            return (
                f"{name} releases a mean with noise, and average='all' multiplies it by n/m, so "
                "that it reveals how many clients took part. average='participants' does not"
            )
        if other.needs_products:
            return (
                f"{name} sets the server's model in each round, and average='all' multiplies the "
                "server's step by n/m. average='participants' does not"
            )
        return ""

    def rows(self, clients: Clients) -> Tensor:
        """Return M of these clients ``(n, D)``, to be changed in place."""
        rows: Tensor = self.M[clients] if self.start == "own" else self.held[clients]
        return rows

    def on_local_start(self, clients: Clients) -> None:
        if self.start == "averaged":
            self.held[clients] = self.M
        if self.variates:
            self.begun[clients] = self.M[clients]

    def precondition(self, clients: Clients, gradient: Tensor) -> Tensor:
        m = self.rows(clients)
        direction = torch.empty_like(gradient)
        if self.vectors == "adam" and len(self.places):
            self._adam(clients, gradient, direction)
        for where, shape, is_vector in self._tensors(clients.layout):
            if is_vector and self.vectors == "adam":
                continue
            g = gradient[:, where]
            own = m[:, where]
            own.mul_(self.momentum).add_(g, alpha=1 - self.momentum)
            u = own
            if self.nesterov:
                u = (1 - self.momentum) * g + self.momentum * own
            if self.variates:
                u = own - self.begun[clients][:, where] + self.C[where]
            if is_vector:
                norm = clients.norm(u)
                direction[:, where] = u * (1 / norm).nan_to_num(posinf=0.0)
            else:
                matrix = u.reshape(len(u), shape[0], -1)
                direction[:, where] = self.scale(matrix) * self.orthogonal(matrix).flatten(1)
        return direction

    def _tensors(self, layout: Layout) -> Iterator[tuple[slice, torch.Size, bool]]:
        for name, (where, shape) in layout.items():
            yield where, shape, self.is_vector[name]

    def scale(self, matrix: Tensor) -> float:
        """s c of matrices ``(n, a, b)``."""
        a, b = matrix.shape[1:]
        s = {
            "original": math.sqrt(max(1, a / b)),
            "match_rms_adamw": 0.2 * math.sqrt(max(a, b)),
            "none": 1.0,
        }
        return s[self.adjust] * self.matrix_lr_scale

    def orthogonal(self, matrix: Tensor) -> Tensor:
        """O of matrices ``(n, a, b)``."""
        wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        if self.orthogonaliser == "svd":
            return by_svd(wide).to(matrix.dtype)
        return by_newton_schulz(wide, self.ns_steps).to(matrix.dtype)

    def _adam(self, clients: Clients, gradient: Tensor, direction: Tensor) -> None:
        """Write Adam's direction of vectors, with fresh moments."""
        places = self.places.to(gradient.device)
        beta1, beta2 = self.betas
        g = gradient[:, places]
        m = self.first[clients]
        v = self.second[clients]
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        k = (clients.step + 1).double()
        root = (v / (1 - beta2**k)).sqrt() + self.epsilon
        direction[:, places] = m / (1 - beta1**k) / root

    def on_local_end(self, clients: Clients) -> None:
        if self.start == "averaged":
            self.sent[clients] = self.held[clients]
        if self.variates:
            self.sent[clients] = self.M[clients] - self.begun[clients]

    def on_server_update(self, server: Server) -> None:
        if self.average == "all":
            server.update *= server.n / server.num_clients
        if self.start == "averaged" and server.n:
            self.M = self.sent.mean()
        if self.variates:
            self.C += self.sent.sum() / server.num_clients


def by_newton_schulz(u: Tensor, steps: int) -> Tensor:
    """Return matrices ``(n, a, b)`` with singular values about 1 and the same singular vectors."""
    tall = u.shape[1] > u.shape[2]
    x = u / (torch.linalg.matrix_norm(u, keepdim=True) + 1e-7)
    if tall:
        x = x.mT
    first, second, third = QUINTIC
    for _ in range(steps):
        a = x @ x.mT
        x = first * x + (second * a + third * a @ a) @ x
    made: Tensor = x.mT if tall else x
    return made


def by_svd(u: Tensor) -> Tensor:
    """Return U_r V_rᵀ of matrices ``(n, a, b)``, over singular values above 10⁻¹² of the largest.

    In single precision the limit is its rounding error; otherwise O would contain noise. The result
    is NaN if a matrix is not finite.
    """
    # torch refuses numbers that are not finite, and the run has to name the client that they belong
    # to.
    finite = u.isfinite().all(2, keepdim=True).all(1, keepdim=True)
    left, values, right = torch.linalg.svd(torch.where(finite, u, 0.0), full_matrices=False)
    least = max(1e-12, max(u.shape[1:]) * torch.finfo(u.dtype).eps)
    kept = values > least * values[:, :1]
    product = (left * kept[:, None, :]) @ right
    return torch.where(finite, product, torch.nan)
