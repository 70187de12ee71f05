"""The contract check of surrogate losses."""

from __future__ import annotations

import torch
from torch import Tensor

from seqdefer.rejectors.losses import Phi, Psi
from seqdefer.testing.rules import require, require_tensor, require_text, type_name

ROUNDING = 1e-9  # in float64


def check_loss(loss: Phi | Psi, *, seed: int = 0) -> None:
    """Check the claims of a surrogate on random scores.

    The shape is kept and values are 0 or more; convexity (always of a Phi, of a Psi that claims it); `upper_scale`;
    `lipschitz`; the `bound` of a Psi; `calibration`, on random distributions; finite values and gradients at extreme
    scores.
    """
    require_text(loss.name, f"name of a {type_name(loss)}")
    generator = torch.Generator().manual_seed(seed)
    for n_classes in (1,) if isinstance(loss, Phi) else (2, 3, 6):
        scores = _random_scores(n_classes, generator)
        values = require_tensor(loss(scores), f"{loss.name} of scores {tuple(scores.shape)}", "float", *scores.shape)
        require((values >= 0).all(), f"{loss.name} is {float(values.min()):.6g} somewhere", "it must be 0 or more")
        _check_extremes(loss, n_classes)
        others = scores[torch.randperm(len(scores), generator=generator)]
        for end in (others, scores + 1e-3 * (others - scores)):
            _check_chords(loss, scores, end)
        if isinstance(loss, Phi):
            _check_phi(loss, scores.squeeze(1), generator)
        else:
            _check_psi(loss, scores, generator)


def _random_scores(n_classes: int, generator: torch.Generator) -> Tensor:
    """Return scores that are equal, close and far apart. float64 (n, J)"""
    sizes = torch.tensor([0.0, 0.1, 1.0, 5.0, 30.0], dtype=torch.float64).repeat_interleave(200)
    return sizes[:, None] * torch.randn(len(sizes), n_classes, generator=generator, dtype=torch.float64)


def _check_extremes(loss: Phi | Psi, n_classes: int) -> None:
    for size in (0.0, 20.0, 1e4):
        scores = torch.full((1, n_classes), size)  # float32, as in training
        scores[0, 0] = -size
        scores = torch.cat([scores, -scores]).requires_grad_()
        values = loss(scores)
        (slopes,) = torch.autograd.grad(values.sum(), scores)
        for what, tensor in (("value", values), ("gradient", slopes)):
            require_tensor(tensor.detach(), f"{what} of {loss.name} at scores of size {size:g}", "float", None, None)


def _check_chords(loss: Phi | Psi, left: Tensor, right: Tensor) -> None:
    """Check convexity and the Lipschitz constant on pairs of scores."""
    at, to, between = loss(left), loss(right), loss((left + right) / 2)
    if isinstance(loss, Phi) or loss.convex:
        bump = float(((between - (at + to) / 2) / (1 + at + to)).max())
        remedy = "use a convex function" if isinstance(loss, Phi) else "set convex=False"
        require(bump <= ROUNDING, f"{loss.name} is not convex: it lies {bump:.3g} (relative) above a chord", remedy)
    if loss.lipschitz is not None:
        steps = (left - right).norm(dim=-1, keepdim=True)
        slope = float(((at - to).abs() / steps.clamp(min=1e-12)).max())
        what = f"{loss.name} rises by {slope:.6g} per unit, more than its lipschitz {loss.lipschitz:.6g}"
        remedy = "declare that, or None" if isinstance(loss, Phi) else "declare that"
        require(slope <= loss.lipschitz * (1 + 1e-6), what, remedy)


def _check_phi(phi: Phi, margins: Tensor, generator: torch.Generator) -> None:
    _check_upper_scale(phi, phi(margins)[margins <= 0])
    eta = torch.rand(len(margins), generator=generator, dtype=torch.float64)
    excess = _binary_risk(phi, eta, margins) - _binary_risk(phi, eta, _best_margins(phi, eta))
    wrong = torch.where(margins >= 0, 1 - eta, eta) - torch.minimum(eta, 1 - eta)
    _check_calibration(phi, wrong, [phi.calibration(value + ROUNDING) for value in excess.tolist()])


def _binary_risk(phi: Phi, eta: Tensor, margins: Tensor) -> Tensor:
    return eta * phi(margins) + (1 - eta) * phi(-margins)


def _best_margins(phi: Phi, eta: Tensor) -> Tensor:
    """Minimise the risk, which is convex, by ternary search."""
    low, high = torch.full_like(eta, -60.0), torch.full_like(eta, 60.0)
    for _ in range(80):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        rising = _binary_risk(phi, eta, left) < _binary_risk(phi, eta, right)
        low, high = torch.where(rising, low, left), torch.where(rising, right, high)
    return (low + high) / 2


def _check_psi(psi: Psi, scores: Tensor, generator: torch.Generator) -> None:
    values, n_classes, best = psi(scores), scores.shape[1], scores.argmax(1, keepdim=True)
    _check_upper_scale(psi, values[torch.arange(n_classes) != best])
    limit, largest = float(scores.abs().max()), float(values.max())
    bound = psi.bound(limit, n_classes)
    what = f"{psi.name} reaches {largest:.6g} within scores of {limit:.6g}, more than its bound {bound:.6g}"
    require(largest <= bound + ROUNDING, what, "correct bound")
    scores, values, best = (tensor[::5] for tensor in (scores, values, best))  # the rest is slow
    chances = torch.softmax(3 * torch.randn(scores.shape, generator=generator, dtype=torch.float64), 1)
    excess = (chances * values).sum(1) - _least_risk(psi, chances)
    wrong = chances.amax(1) - chances.gather(1, best).squeeze(1)
    _check_calibration(psi, wrong, [psi.calibration(value + ROUNDING, n_classes) for value in excess.tolist()])


def _least_risk(psi: Psi, chances: Tensor) -> Tensor:
    """Return min over g of sum_j p_j psi(g, j), by descent from likely minima. (n, J) -> (n,)"""
    sure = 80 * torch.nn.functional.one_hot(chances.argmax(1), chances.shape[1]).to(chances)
    least = torch.full_like(chances[:, 0], torch.inf)
    for begin in (chances.log(), sure, torch.zeros_like(chances)):
        scores = begin.clone().requires_grad_()
        optimizer = torch.optim.Adam([scores], lr=0.1)
        for _ in range(100):
            risk = (chances * psi(scores)).sum(1)
            least = torch.minimum(least, risk.detach())
            optimizer.zero_grad()
            risk.sum().backward()
            optimizer.step()
    return least


def _check_upper_scale(loss: Phi | Psi, values_of_mistakes: Tensor) -> None:
    least = float(values_of_mistakes.min()) * loss.upper_scale
    what = f"upper_scale x {loss.name} is {least:.6g} at a mistake, below the 0-1 loss"
    require(least >= 1 - ROUNDING, what, f"raise upper_scale {loss.upper_scale:.6g}")


def _check_calibration(loss: Phi | Psi, wrong: Tensor, bounds: list[float]) -> None:
    gap, place = (wrong - torch.tensor(bounds, dtype=wrong.dtype)).max(0)
    what = f"calibration of {loss.name} gives {bounds[int(place)]:.6g} where the excess 0-1 risk is {wrong[place]:.6g}"
    require(gap <= 1e-6, what, "use a larger function")
