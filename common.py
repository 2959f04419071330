"""What every script shares: the maths of one denoising step, of advantages and of the losses.

Part I needs torch and the standard library only: copy it, up to the next banner, into any codebase.
Notation (the whole project keeps it): t, s = noise level now and next, 1 is pure noise, t > s;
x_t = (1-t) x0 + t eps; v = eps - x0; abar = cumulative alpha product of variance-preserving models;
r, A, rho = reward, advantage, probability ratio; B = P * G images, index = p * G + g.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

# ---- Part I: the maths (torch only; copy this part anywhere) ----

Coef = float | Tensor  # float, 0-d or (B,): broadcasts over the trailing axes of a latent
Maybe = Tensor | None

T_SINGULAR = 0.999  # from here up t counts as 1: grids often start at 0.9999, not at 1
MAX_LOG_RHO = 20.0  # exp(20) = 5e8: far outside any clip range, far inside fp32
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Step(NamedTuple):
    """One transition x_t -> x_s: x_next = mean + std * noise (noise None: the mean), or as given.

    logp (B,) is log N(x_next; mean, std^2), MEAN over elements; 0 without gradient where std = 0.
    std, 0-d or (B, 1, ...), has the step size in it.
    """

    x_next: Tensor
    logp: Tensor
    mean: Tensor
    std: Tensor


def _upcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All tensors in their common dtype, at least fp32 (float64 stays float64)."""
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return tuple(x.to(dtype) for x in tensors)


def _expand(c: Coef, x: Tensor) -> Tensor:
    """A coefficient (float, 0-d or (B,)) in the dtype of x, ready to broadcast from the left."""
    c = torch.as_tensor(c, dtype=x.dtype, device=x.device)
    return c.view(-1, *[1] * (x.dim() - 1)) if c.dim() == 1 else c


def _prepare(x: Tensor, y: Tensor, *coefs: Coef) -> tuple[Tensor, ...]:
    """Two latents through _upcast, then their coefficients through _expand."""
    x, y = _upcast(x, y)
    return x, y, *(_expand(c, x) for c in coefs)


def _mean(x: Tensor) -> Tensor:
    """(B, ...) -> (B,). Not dim=(1, 2, ...): an empty dim, for x of rank 1, averages over B."""
    return x.reshape(x.shape[0], -1).mean(1)


def interpolate(x0: Tensor, eps: Tensor, t: Coef) -> Tensor:
    """x_t = (1-t) x0 + t eps, the rectified-flow path."""
    x0, eps, t = _prepare(x0, eps, t)
    return (1 - t) * x0 + t * eps


def velocity_to_x0(x_t: Tensor, v: Tensor, t: Coef) -> Tensor:
    """x0 = x_t - t v (rectified flow)."""
    x_t, v, t = _prepare(x_t, v, t)
    return x_t - t * v


def velocity_to_eps(x_t: Tensor, v: Tensor, t: Coef) -> Tensor:
    """eps = x_t + (1-t) v (rectified flow)."""
    x_t, v, t = _prepare(x_t, v, t)
    return x_t + (1 - t) * v


def eps_to_x0(x_t: Tensor, eps: Tensor, abar: Coef) -> Tensor:
    """x0 = (x_t - sqrt(1-abar) eps) / sqrt(abar) (variance preserving); singular at abar = 0."""
    x_t, eps, abar = _prepare(x_t, eps, abar)
    return (x_t - (1 - abar).sqrt() * eps) / abar.sqrt()


def eps_to_velocity(x_t: Tensor, eps: Tensor, abar: Coef) -> Tensor:
    """v = sqrt(abar) eps - sqrt(1-abar) x0 = (eps - sqrt(1-abar) x_t) / sqrt(abar).

    Variance preserving; singular at abar = 0.
    """
    x_t, eps, abar = _prepare(x_t, eps, abar)
    return (eps - (1 - abar).sqrt() * x_t) / abar.sqrt()


def _standardise(d: Tensor, std: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """(z = d / std, std, live). Where std = 0 z is 0, std is 1, and neither carries a gradient."""
    std = torch.as_tensor(std, dtype=d.dtype, device=d.device)
    live = std > 0
    std = torch.where(live, std, 1.0)
    # the inner where comes before the division, so the backward pass never meets 0 * inf
    return torch.where(live, d, 0.0) / std, std, live


def gaussian_logp(x: Tensor, mean: Tensor, std: float | Tensor) -> Tensor:
    """log N(x; mean, std^2), MEAN over elements (papers: sum): clip ranges depend on resolution.

    std broadcastable to x -> (B,). Elements with std = 0 are deterministic: 0, without gradient.
    """
    x, mean = _upcast(x, mean)
    z, std, live = _standardise(x - mean, std)
    return _mean(torch.where(live, -0.5 * z.square() - std.log() - HALF_LOG_2PI, 0.0))


def gaussian_kl(mean: Tensor, mean_ref: Tensor, std: float | Tensor) -> Tensor:
    """KL of two Gaussians of one std: (mean - mean_ref)^2 / (2 std^2), MEAN over elements.

    std broadcastable to mean -> (B,); 0 where std = 0. The beta values published for Flow-GRPO
    since 2025-07-15 belong to its own formula, h times this one.
    """
    mean, mean_ref = _upcast(mean, mean_ref)
    return _mean(0.5 * _standardise(mean - mean_ref, std)[0].square())


def _step(mean: Tensor, std: Tensor, noise: Maybe, x_next: Maybe) -> Step:
    """Draw x_next, or take the one given, and score it."""
    if x_next is None:
        x_next = mean
        if noise is not None:
            mean, noise = _upcast(mean, noise)
            x_next = mean + std * noise
    x_next, mean = _upcast(x_next, mean)
    # detached: through a reparametrised x_next the gradient of logp would be exactly 0
    return Step(x_next, gaussian_logp(x_next.detach(), mean, std), mean, std)


def euler_step(x: Tensor, v: Tensor, t: Coef, s: Coef) -> Tensor:
    """x_s = x_t - (t-s) v: the probability-flow ODE of a rectified flow, first order."""
    x, v, t, s = _prepare(x, v, t, s)
    return x - (t - s) * v


def flow_sde_step(
    x: Tensor, v: Tensor, t: Coef, s: Coef, a: Coef, noise: Maybe = None, x_next: Maybe = None
) -> Step:
    """Flow-GRPO (2505.05470), h = t-s: mean = (1 - a^2 h / (2 (1-t))) x - (1 + a^2/2) h v,
    std = a sqrt(t h / (1-t)). t >= 0.999 counts as 1, where the official code puts h for 1-t in
    the noise: mean = (1 - a^2/2) x - h v, std = a for any h. a = 0 is exactly the Euler step.
    """
    x, v, t, s, a = _prepare(x, v, t, s, a)
    h, first = t - s, t >= T_SINGULAR
    h_over = torch.where(first, 1.0, h / torch.where(first, 1.0, 1 - t))
    coef_v = h * torch.where(first, 1.0, 1 + a**2 / 2)
    mean = x * (1 - a**2 / 2 * h_over) - coef_v * v
    return _step(mean, a * torch.where(first, 1.0, t * h_over).sqrt(), noise, x_next)


def flow_cps_step(
    x: Tensor, v: Tensor, t: Coef, s: Coef, eta: Coef, noise: Maybe = None, x_next: Maybe = None
) -> Step:
    """CPS (2509.05952): mean = (1-s) x0 + s cos(eta pi/2) eps, std = s sin(eta pi/2).

    logp is the true Gaussian one. The official code drops 1/(2 std^2) and the constants: its
    log-ratio is 2 std^2 times this one, and its published clip ranges do not carry over.
    """
    x, v, t, s, eta = _prepare(x, v, t, s, eta)
    angle = eta * (math.pi / 2)
    mean = (1 - s) * velocity_to_x0(x, v, t) + s * angle.cos() * velocity_to_eps(x, v, t)
    return _step(mean, s * angle.sin(), noise, x_next)


def flow_dance_step(
    x: Tensor, v: Tensor, t: Coef, s: Coef, eta: Coef, noise: Maybe = None, x_next: Maybe = None
) -> Step:
    """DanceGRPO (2505.07818), h = t-s, constant diffusion: std = eta sqrt(h),
    mean = x - h v - eta^2 h eps / (2 t) with eps = x + (1-t) v. eta = 0 is the Euler step.
    """
    x, v, t, s, eta = _prepare(x, v, t, s, eta)
    h = t - s
    pull = eta**2 / 2 * h / torch.where(t > 0, t, 1.0)  # a step from t = 0 has h = 0: no 0 / 0
    mean = x - h * v - pull * velocity_to_eps(x, v, t)
    return _step(mean, eta * h.sqrt(), noise, x_next)


def ddim_step(
    x: Tensor,
    eps: Tensor,
    abar_t: Coef,
    abar_s: Coef,
    eta: Coef,
    noise: Maybe = None,
    x_next: Maybe = None,
) -> Step:
    """DDIM (2010.02502), A = abar_t, A' = abar_s: mean = sqrt(A') x0 + sqrt(1 - A' - std^2) eps,
    std = eta sqrt((1-A') / (1-A) (1 - A/A')), 0 for A' = 1 or A' = A. eta = 1: DDPO's policy.
    """
    x, eps, abar_t, abar_s, eta = _prepare(x, eps, abar_t, abar_s, eta)
    noisy = abar_t < 1
    # A' - A is exact where 1 - A/A' cancels; clamp: rounding, or a grid that runs backwards
    var = (1 - abar_s) / torch.where(noisy, 1 - abar_t, 1.0) * ((abar_s - abar_t) / abar_s)
    std = eta * torch.where(noisy, var, 0.0).clamp(min=0).sqrt()
    x0 = eps_to_x0(x, eps, abar_t)
    mean = abar_s.sqrt() * x0 + (1 - abar_s - std**2).clamp(min=0).sqrt() * eps
    return _step(mean, std, noise, x_next)


def _finite64(r: Tensor) -> tuple[Tensor, Tensor, torch.dtype]:
    """(rewards in float64 with 0 for the non-finite, mask of the finite, dtype of the result)."""
    r = torch.as_tensor(r).detach()
    if r.dim() != 1:
        raise ValueError(f"rewards must have shape (B,), got {tuple(r.shape)}")
    dtype = torch.float64 if r.dtype == torch.float64 else torch.float32
    ok = r.isfinite()
    return torch.where(ok, r, 0).double(), ok, dtype


def _moments(r: Tensor, ok: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, population std and "the values differ", each (..., 1), of the entries marked ok."""
    n = ok.sum(-1, keepdim=True).clamp(min=1)
    mean = torch.where(ok, r, 0.0).sum(-1, keepdim=True) / n
    var = torch.where(ok, r - mean, 0.0).square().sum(-1, keepdim=True) / n
    low = torch.where(ok, r, math.inf).amin(-1, keepdim=True)
    high = torch.where(ok, r, -math.inf).amax(-1, keepdim=True)
    # not var > 0: the rounded mean of equal values differs from them
    return mean, var.sqrt(), high > low


def group_advantages(
    r: Tensor,
    G: int,
    std: Literal["group", "global", "none"] = "group",
    eps: float = 1e-4,
    clip: float | None = None,
) -> Tensor:
    """A = (r - group mean) / (std + eps), population std of the group or of all ("none": r - mean).

    r (P*G,), groups adjacent -> (P*G,), clamped to +-clip. A non-finite reward gets 0 and touches
    no other; a group of equal (or < 2 finite) rewards gets exactly 0. ValueError: G < 2, ragged.
    """
    if G < 2:
        raise ValueError(f"G = {G}: a group needs at least 2 images to compare")
    if std not in ("group", "global", "none"):
        raise ValueError(f"std = {std!r}: use group, global or none")
    r, ok, dtype = _finite64(r)
    if len(r) % G:
        raise ValueError(f"G = {G} does not divide the {len(r)} rewards")
    mean, spread, differ = _moments(r.view(-1, G), ok.view(-1, G))  # (P, 1)
    if std == "global":
        spread = _moments(r, ok)[1]
    scale = torch.ones_like(spread) if std == "none" else spread + eps
    live = ok.view(-1, G) & differ
    A = torch.where(live, r.view(-1, G) - mean, 0.0) / torch.where(differ, scale, 1.0)
    A = A if clip is None else A.clamp(-clip, clip)
    return A.flatten().to(dtype)


class RewardHistory:
    """DDPO's baseline (2305.13301): the last `size` rewards of each prompt, over iterations."""

    def __init__(self, size: int, min_count: int, eps: float = 1e-6) -> None:
        if size < 1:
            raise ValueError(f"size = {size}: a history needs room for at least 1 reward")
        self.size, self.min_count, self.eps = size, min_count, eps
        self._rewards: dict[int, deque[float]] = {}

    def advantages(self, prompt_ids: Tensor | Sequence[int], r: Tensor) -> Tensor:
        """Append r, then A = (r - mean) / (std + eps) -> (B,), population std, over the prompt's
        buffer or, while that has fewer than min_count values, over the batch. Non-finite rewards
        get 0 and are not stored. Equal values give 0, also to a reward the buffer has dropped.
        """
        r, ok, dtype = _finite64(r)
        ids = torch.as_tensor(prompt_ids, device=r.device)
        if ids.shape != r.shape:
            raise ValueError(f"prompt_ids {tuple(ids.shape)} for rewards {tuple(r.shape)}")
        A = torch.zeros_like(r)
        for i in set(ids[ok].tolist()):
            mine = ok & (ids == i)
            buffer = self._rewards.setdefault(int(i), deque(maxlen=self.size))
            buffer.extend(r[mine].tolist())
            known = r[ok] if len(buffer) < self.min_count else r.new_tensor(list(buffer))
            mean, spread, differ = _moments(known, torch.ones_like(known, dtype=torch.bool))
            if differ:
                A[mine] = (r[mine] - mean) / (spread + self.eps)
        return A.to(dtype)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts, for an exact resume."""
        return {"size": self.size, "rewards": {i: list(b) for i, b in self._rewards.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the buffers of `state_dict()`; ValueError if the history had another size."""
        if state["size"] != self.size:
            raise ValueError(f"the saved history has size {state['size']}, this one {self.size}")
        self._rewards = {int(i): deque(b, self.size) for i, b in state["rewards"].items()}


def clipped_surrogate(
    logp: Tensor, logp_old: Tensor, A: Tensor, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO (1707.06347), rho = exp(logp - logp_old): mean_B max(-A rho, -A clamp(rho, 1 -+ clip)).

    All inputs (B,), gradient to logp only -> (loss (), stats). stats, 0-d and detached: rho_mean,
    clip_fraction (|rho - 1| > clip, whatever the sign of A), kl_old = mean (log rho)^2 / 2,
    log_rho_max = max |log rho|. |log rho| > 20 counts as 20, without gradient.
    """
    if not logp.shape == logp_old.shape == A.shape:
        raise ValueError(f"shapes differ: {[tuple(x.shape) for x in (logp, logp_old, A)]}")
    logp, logp_old = _upcast(logp, logp_old.detach())
    A = A.detach().to(logp.dtype)
    log_rho = logp - logp_old
    rho = log_rho.clamp(-MAX_LOG_RHO, MAX_LOG_RHO).exp()  # exp may not overflow: 0 * inf is NaN
    loss = torch.maximum(-A * rho, -A * rho.clamp(1 - clip, 1 + clip)).mean()
    log_rho, rho = log_rho.detach(), rho.detach()
    stats = {
        "rho_mean": rho.mean(),
        "clip_fraction": ((rho - 1).abs() > clip).to(rho.dtype).mean(),
        "kl_old": 0.5 * log_rho.square().mean(),
        "log_rho_max": log_rho.abs().max(),
    }
    return loss, stats


def stratified_indices(n: int, M: int, generator: torch.Generator) -> Tensor:
    """One uniform index per chunk of tensor_split(arange(n), M) -> (M,) long (V-GRPO, 2604.23380).

    Increasing. Not uniform over indices where M does not divide n. ValueError unless 1 <= M <= n.
    """
    if not 1 <= M <= n:
        raise ValueError(f"M = {M} chunks of {n} indices: need 1 <= M <= n")
    device = generator.device
    chunks = torch.arange(n, device=device).tensor_split(M)
    return torch.cat(
        [c[torch.randint(len(c), (1,), generator=generator, device=device)] for c in chunks]
    )


def denoising_error(
    pred: Tensor, target: Tensor, weight: Literal["none", "self"] | Tensor = "none"
) -> Tensor:
    """mean (pred - target)^2 over elements -> (B,); a tensor weight, (B,), multiplies it.

    "self" divides by sg(mean |pred - target|) clamped at 1e-5: V-GRPO (2604.23380) Eq. 14, but
    with the MEAN of squares (paper: sum). ValueError: unequal shapes, another word.
    """
    if pred.shape != target.shape:
        raise ValueError(f"pred {tuple(pred.shape)} and target {tuple(target.shape)} differ")
    pred, target = _upcast(pred, target)
    d = pred - target
    if isinstance(weight, Tensor):
        return _mean(_expand(weight, d) * d.square())
    if weight not in ("none", "self"):
        raise ValueError(f"weight = {weight!r}: use none, self or a tensor")
    err = _mean(d.square())
    return err if weight == "none" else err / _mean(d.detach().abs()).clamp(min=1e-5)


def rwr_weights(r: Tensor, inverse_temperature: float, groups: Tensor | None = None) -> Tensor:
    """RWR of DDPO (2305.13301): w = N softmax(inverse_temperature r) -> (B,), of all or per group.

    N counts the finite rewards (of the group), so THEIR mean weight is 1; the non-finite weigh 0.
    groups (B,) integer ids.
    """
    r, ok, dtype = _finite64(r)
    groups = torch.zeros_like(r) if groups is None else torch.as_tensor(groups, device=r.device)
    if groups.shape != r.shape:
        raise ValueError(f"groups {tuple(groups.shape)} for rewards {tuple(r.shape)}")
    w = torch.zeros_like(r)
    for g in set(groups.tolist()):
        live = ok & (groups == g)
        w[live] = live.sum() * torch.softmax(inverse_temperature * r[live], 0)
    return w.to(dtype)
