"""Faults of the methods of 2023 to 2026: each is a slip of a published code."""

from __future__ import annotations

from tests.faults.faults_list import Fault

ADAM = "callbacks/directions/adam_direction.py"
MUON = "callbacks/directions/muon_direction.py"
GLOBAL = "callbacks/directions/global_direction.py"
AHEAD = "callbacks/server/lookahead_momentum.py"
GUIDED = "callbacks/sharpness/momentum_guided_perturbation.py"
ASCENT = "callbacks/sharpness/server_ascent.py"
ALA = "callbacks/personal/adaptive_local_aggregation.py"
APFL = "callbacks/personal/mixed_personal_model.py"
ROD = "callbacks/personal/personal_head.py"
PROTO = "callbacks/personal/prototype_pull.py"
META = "callbacks/personal/meta_gradient.py"
PRIVACY = "callbacks/robust/differential_privacy.py"
RECORDS = "callbacks/robust/record_privacy.py"
STEP = "fl_lightning/client/local_step.py"
FACTORS = "fl_lightning/client/linear_factors.py"
SAMPLES = "fl_lightning/client/sample_gradients.py"
ALIGNED = "callbacks/drift/aligned_duals.py"
ADMM = "callbacks/drift/augmented_models.py"
DYN = "callbacks/drift/dynamic_regularization.py"
MEMORY = "callbacks/server/update_memory.py"
DISCO = "callbacks/server/discrepancy_weights.py"
DECORR = "callbacks/losses/decorrelated_features.py"
GMT = "callbacks/losses/trajectory_distillation.py"
SOAP = "callbacks/directions/soap_direction.py"
SVD = "callbacks/adapters/orthogonal_factor.py"
RAVAN = "callbacks/adapters/scaled_heads.py"

MODERN_FAULTS = [
    Fault(
        "FedAdamW: the step counts on over rounds for both moments",
        [
            (
                ADAM,
                "(clients.step + 1).double()",
                "(clients.step + 1 + 100 * clients.round).double()",
            )
        ],
    ),
    Fault(
        "FedAdamW: all of v is sent",
        [(ADAM, 'if self.share == "rows" and len(shape) >= 2 else 1', "if True else 1")],
    ),
    Fault(
        "FedAdamW: clients start with v = 0",
        [(ADAM, "self.v[clients] = self.second_mean[block]", "pass")],
    ),
    Fault(
        "FedAdamW: the share of zeros is not carried over rounds",
        [(ADAM, 'share * getattr(self, f"{moment}_faded").mean()', "share")],
    ),
    Fault(
        "FedLADA: the direction is added, not mixed",
        [(GLOBAL, "direction.mul_(1 - self.alpha)", "pass")],
    ),
    Fault(
        "FedMuon: weight decay is scaled with matrices",
        [(MUON, "return s[self.adjust] * self.matrix_lr_scale", "return s[self.adjust]")],
    ),
    Fault(
        "FedMuon-LMO: the server's variate is over participants",
        [(MUON, "self.sent.sum() / server.num_clients", "self.sent.sum() / server.n")],
    ),
    Fault(
        "Muon: wide matrices are scaled in place of tall ones",
        [(MUON, "math.sqrt(max(1, a / b))", "math.sqrt(max(1, b / a))")],
    ),
    Fault(
        "FedACG: the server's own momentum is not added",
        [(AHEAD, "server.update += ahead", "pass")],
    ),
    Fault(
        "FedWMSAM: the perturbation points the other way",
        [
            (
                GUIDED,
                "away = clients.w + clients.step * self.guide[clients] - clients.x",
                "away = clients.x - clients.w - clients.step * self.guide[clients]",
            )
        ],
    ),
    Fault(
        "FedWMSAM: the norm sums absolute values",
        [(GUIDED, "self.radius / clients.norm(away)", "self.radius / away.abs().sum(1, True)")],
    ),
    Fault(
        "FedSWA: the client doubles its rate",
        [
            (
                "callbacks/drift/decay_within_round.py",
                "rate: Tensor = 1 - clients.step",
                "rate: Tensor = 2 - clients.step",
            )
        ],
    ),
    Fault(
        "FedMoSWA: the mean gradient divides by η K",
        [
            (
                "fl_lightning/round/client_group.py",
                "        if self.rates_used is not None:\n            here = ",
                "        if self.rates_used is not None:\n            _ = ",
            )
        ],
    ),
    Fault(
        "FedMoSWA: what is sent is relative to c_i",
        [
            (
                "callbacks/drift/control_variates.py",
                "change = self.c_i[clients] - self.c\n",
                "pass\n",
            )
        ],
    ),
    Fault(
        "FedGloSS: the perturbation climbs along the update",
        [(ASCENT, "server.w - scale", "server.w + scale")],
    ),
    Fault(
        "APFL: the gradient is taken at v",
        [(APFL, "clients.gradient_at(middle)", "clients.gradient_at(v)")],
    ),
    Fault(
        "FedALA: all layers are learned",
        [(ALA, 'layout.named(self.parts_, "AdaptiveLocalAggregation")', "[*layout]")],
    ),
    Fault(
        "FedBABU: weight decay moves the head",
        [
            (
                "callbacks/personal/fixed_head.py",
                "clients.x = torch.where(self.of_head[clients], clients.start, clients.x)",
                "pass",
            )
        ],
    ),
    Fault(
        "FedProto: clients are pulled to 0 for classes that nobody had",
        [(PROTO, "(far * self.a[batch[1]]).mean()", "far.mean()")],
    ),
    Fault(
        "FedProto: prototypes that nobody had are forgotten",
        [(PROTO, "torch.where(counts[:, None] > 0, means, self.P)", "means")],
    ),
    Fault(
        "FedRoD: the personal logits leave out those of the head",
        [(ROD, 'seen["logits"].detach() + f @ head.mT', "f @ head.mT")],
    ),
    Fault(
        "Per-FedAvg: the second step has the rate of the first",
        [(META, "(ahead - behind) / (2 * self.delta)", "(ahead - behind) / self.delta")],
    ),
    Fault(
        "q-FedAvg: the loss is that of another model",
        [
            (
                "callbacks/server/fair_aggregation.py",
                "clients.evaluate(clients.w)",
                "clients.evaluate(clients.w * 0.9)",
            )
        ],
    ),
    Fault(
        "adaptive clipping: clipped updates are counted",
        [(PRIVACY, "(self._norm(update.double()) <= ", "(self._norm(update.double()) > ")],
    ),
    Fault(
        "adaptive clipping: the sum has the noise of the whole round",
        [
            (
                PRIVACY,
                "of_sum: float = (sigma**-2 - (2 * deviation) ** -2) ** -0.5",
                "of_sum = sigma",
            )
        ],
    ),
    Fault(
        "DP-SGD: samples are not clipped",
        [(RECORDS, "(self.clip / norms).clamp(max=1.0)", "torch.ones_like(norms)")],
    ),
    Fault(
        "DP-SGD: samples are scaled by the mean norm, and not each by its own",
        [(RECORDS, "(self.clip / norms)", "(self.clip / norms.mean(1, keepdim=True))")],
    ),
    Fault(
        "DP-SGD: the noise is that of a mean, and not of a sum",
        [
            (
                RECORDS,
                "alpha=sigma * self.clip)",
                "alpha=sigma * self.clip / expected)",
            )
        ],
    ),
    Fault(
        "DP-SGD: anybody who knows the run's seed can compute the noise",
        [(RECORDS, 'return "secret" if self.noise_seed is None else self.noise_seed', "return 1")],
    ),
    Fault(
        "DP-SGD: epsilon is of a client in the middle",
        [(RECORDS, "return max(spent, default=(0.0, 0))", "return min(spent, default=(0.0, 0))")],
    ),
    Fault(
        "DP-SGD: what is not finite makes the sum so",
        [(FACTORS, "used = scales != 0", "used = scales == scales")],
    ),
    Fault(
        "DP-SGD: a step is divided by its own number of samples",
        [
            (
                RECORDS,
                "expected = self._batch_of(int(clients.sizes))",
                "expected = int(clients.sizes)",
            )
        ],
    ),
    Fault(
        "DP-SGD: the run stops one round too late",
        [(RECORDS, "counts[ids] += self._in_round(steps, torch.from_numpy(ids)).numpy()", "pass")],
    ),
    Fault(
        "DP-SGD: shuffled batches are counted as drawn by coins",
        [(RECORDS, 'if self.sampling == "shuffle" or not size:', "if not size:")],
    ),
    Fault(
        "DP-SGD: one client's losses reach another method",
        [("fl_lightning/round/clients.py", 'self._check_samples("clients.evaluate")', "pass")],
    ),
    Fault(
        "the gradient of a sample has what is not trained",
        [(STEP, "gradients.whole.masked_fill_(self.group.untrained, 0.0)", "pass")],
    ),
    Fault(
        "the norm of a sample's gradient lacks the bias",
        [(FACTORS, "ones = 0 if bias is None else 1", "ones = 0")],
    ),
    Fault(
        "a linear layer that a step calls twice has the gradient of one call",
        [(FACTORS, "again = index in self.inputs", "again = False")],
    ),
    Fault(
        "a linear layer whose weights are used elsewhere lacks that gradient",
        [(SAMPLES, "if losses.requires_grad or recorder.missing()", "if recorder.missing()")],
    ),
    Fault(
        "the direction of a step is that of the gradient",
        [
            (
                STEP,
                "return self.group.trained_part(self.after(self.directions, gradient))",
                "return self.group.trained_part(self.after(self.directions[1:], gradient))",
            )
        ],
    ),
    Fault(
        "A-FedPD: the dual's sign is flipped",
        [(ALIGNED, ".sub_(self.anchor[clients])", ".add_(self.anchor[clients])")],
    ),
    Fault(
        "A-FedPD: participants' rows are not measured from the mean",
        [(ALIGNED, "deviation += back", "pass")],
    ),
    Fault(
        "A-FedPD: absent duals stay, as FedDyn's",
        [
            (
                ALIGNED,
                "self.lambda_mean -= self.penalty * self.moved.mean()",
                "self.lambda_mean -= self.penalty * self.moved.sum() / server.num_clients",
            )
        ],
    ),
    Fault(
        "FedADMM: the change of the dual is not sent",
        [(ADMM, "return moved + moved", "return moved")],
    ),
    Fault(
        "FedADMM: the client's last model stays w^0",
        [(ADMM, "self.last[clients] = clients.x", "pass")],
    ),
    Fault(
        "FedADMM: the dual climbs along the update",
        [
            (
                ADMM,
                "self.lambda_i[clients].sub_(clients.x",
                "self.lambda_i[clients].add_(clients.x",
            )
        ],
    ),
    Fault(
        "FedGMT: steps are pulled to w, as FedDyn's",
        [(DYN, "if self.pull:", "if True:")],
    ),
    Fault(
        "FedGMT: the duals' anchor has w, which without the pull nothing cancels",
        [(DYN, "if not self.pull:", "if False:")],
    ),
    Fault(
        "FedVARP: the memory of absent clients is lost",
        [(MEMORY, "self.y_mean += share", "self.y_mean = self.delta.mean()")],
    ),
    Fault(
        "MIFA: the mean is over participants",
        [(MEMORY, "self.delta.sum() / server.num_clients", "self.delta.sum() / server.n")],
    ),
    Fault(
        "MIFA: memories are of the update, not of the update over η",
        [(MEMORY, "u = u / clients.lr.to(u)", "pass")],
    ),
    Fault(
        "FedDisco: weights do not sum to 1",
        [(DISCO, "weights = weights / weights.sum()", "pass")],
    ),
    Fault(
        "FedDisco: KL is taken from the target to the client",
        [
            (
                DISCO,
                "(torch.xlogy(q, q) - torch.xlogy(q, target))",
                "(torch.xlogy(target, target) - torch.xlogy(target, q + 1e-9))",
            )
        ],
    ),
    Fault(
        "FedDisco: a distance is not divided by the participants' sum",
        [(DISCO, "distance = distance / distance.sum()", "pass")],
    ),
    Fault(
        "FedDecorr: features are not standardised",
        [
            (
                DECORR,
                "centred / torch.sqrt(1e-8 + centred.square().sum(0) / (samples - 1))",
                "centred",
            )
        ],
    ),
    Fault(
        "FedDecorr: the term is not divided by the batch",
        [(DECORR, "(width * (width - 1) * samples)", "(width * (width - 1))")],
    ),
    Fault(
        "FedGMT: e takes the share of w that it should keep",
        [
            (
                GMT,
                "self.decay * self.e + (1 - self.decay) * server.w",
                "(1 - self.decay) * self.e + self.decay * server.w",
            )
        ],
    ),
    Fault(
        "FedGMT: KL is taken from the student to the teacher",
        [
            (
                GMT,
                "log_softmax(student, 1), log_softmax(teacher, 1)",
                "log_softmax(teacher, 1), log_softmax(student, 1)",
            )
        ],
    ),
    Fault(
        "FedGMT: τ² is left out",
        [(GMT, "self.strength * (self.temperature * self.temperature)", "self.strength")],
    ),
    Fault(
        "SOAP: v is not reordered with the basis",
        [(SOAP, "v.copy_(v.gather(j, rows.expand_as(v)))", "pass")],
    ),
    Fault(
        "SOAP: the first step is not skipped",
        [
            (
                SOAP,
                "direction = torch.zeros_like(gradient)",
                "direction = torch.zeros_like(gradient) if k else gradient.clone()",
            )
        ],
    ),
    Fault(
        "SOAP: the first moment stays in the old basis",
        [(SOAP, "times(along, basis.mT, j)", "along")],
    ),
    Fault(
        "FedPAC SOAP: clients start with G = 0",
        [(SOAP, "self.g[clients] = self.G", "pass")],
    ),
    Fault(
        "FedSVD: QR of A in place of the SVD of the product",
        [
            (
                SVD,
                "low_rank.cut(b, a, adapter.rank, a)",
                "(torch.linalg.qr(a.T)[0].T, b @ torch.linalg.qr(a.T)[1].T)",
            )
        ],
    ),
    Fault(
        "FedSVD: round 0 counts as the end of a period",
        [(SVD, "(server.round + 1) % self.period", "server.round % self.period")],
    ),
    Fault(
        "FedSVD: a client with an old A is not sent the new one",
        [(SVD, "int(self.changed) > (last or 0)", "int(self.changed) > t")],
    ),
    Fault(
        "RAVAN: scales are not folded into cores",
        [(RAVAN, "(s[:, :, None] * h).flatten(1)", "h.flatten(1)")],
    ),
    Fault(
        "RAVAN: scales are averaged too",
        [
            (RAVAN, "message[:, scale] = 0.0", "pass"),
            (RAVAN, "server.update[scale] = 0.0", "pass"),
        ],
    ),
]
