"""What every script shares: the maths of one denoising step, of advantages and of the losses.

Part I needs torch and the standard library only: copy it, up to the next banner, into any codebase.
Notation (the whole project keeps it): t, s = noise level now and next, 1 is pure noise, t > s;
x_t = (1-t) x0 + t eps; v = eps - x0; abar = cumulative alpha product of variance-preserving models;
r, A, rho = reward, advantage, probability ratio; B = P * G images, index = p * G + g.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import importlib.util
import json
import math
import os
import shutil
import signal
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

# ==== Part I: the maths (torch only; copy this part anywhere) =====================================

Coef = float | Tensor  # float, 0-d or (B,): broadcasts over the trailing axes of a latent
Maybe = Tensor | None
Std = Literal["group", "global", "none"]

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


def _expand(c: Coef, x: Tensor) -> Tensor:
    """A coefficient (float, 0-d or (B,)) in the dtype of x, ready to broadcast from the left."""
    c = torch.as_tensor(c, dtype=x.dtype, device=x.device)
    return c.view(-1, *[1] * (x.dim() - 1)) if c.dim() == 1 else c


def _prepare(x: Tensor, y: Tensor, *coefs: Coef) -> tuple[Tensor, ...]:
    """Two tensors in their common dtype, at least fp32 (float64 stays), then their coefficients."""
    dtype = torch.promote_types(torch.promote_types(torch.float32, x.dtype), y.dtype)
    x, y = x.to(dtype), y.to(dtype)
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
    """v = sqrt(abar) eps - sqrt(1-abar) x0 (variance preserving); singular at abar = 0."""
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
    x, mean = _prepare(x, mean)
    z, std, live = _standardise(x - mean, std)
    return _mean(torch.where(live, -0.5 * z.square() - std.log() - HALF_LOG_2PI, 0.0))


def gaussian_kl(mean: Tensor, mean_ref: Tensor, std: float | Tensor) -> Tensor:
    """KL of two Gaussians of one std: (mean - mean_ref)^2 / (2 std^2), MEAN over elements.
    std broadcastable to mean -> (B,); 0 where std = 0. The beta values published for Flow-GRPO
    since 2025-07-15 belong to its own formula, h times this one.
    """
    mean, mean_ref = _prepare(mean, mean_ref)
    return _mean(0.5 * _standardise(mean - mean_ref, std)[0].square())


def _step(mean: Tensor, std: Tensor, noise: Maybe, x_next: Maybe) -> Step:
    """Draw x_next, or take the one given, and score it."""
    if x_next is None:
        x_next = mean
        if noise is not None:
            mean, noise = _prepare(mean, noise)
            x_next = mean + std * noise
    x_next, mean = _prepare(x_next, mean)
    # detached: through a reparametrised x_next the gradient of logp would be exactly 0
    return Step(x_next, gaussian_logp(x_next.detach(), mean, std), mean, std)


def euler_step(x: Tensor, v: Tensor, t: Coef, s: Coef) -> Tensor:
    """x_s = x_t - (t-s) v: the probability-flow ODE of a rectified flow, first order."""
    x, v, t, s = _prepare(x, v, t, s)
    return x - (t - s) * v


def flow_sde_step(x: Tensor, v: Tensor, t: Coef, s: Coef, a: Coef, noise: Maybe = None,
                  x_next: Maybe = None) -> Step:  # fmt: skip
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


def flow_cps_step(x: Tensor, v: Tensor, t: Coef, s: Coef, eta: Coef, noise: Maybe = None,
                  x_next: Maybe = None) -> Step:  # fmt: skip
    """CPS (2509.05952): mean = (1-s) x0 + s cos(eta pi/2) eps, std = s sin(eta pi/2).

    logp is the true Gaussian one. The official code drops 1/(2 std^2) and the constants: its
    log-ratio is 2 std^2 times this one, and its published clip ranges do not carry over.
    """
    x, v, t, s, eta = _prepare(x, v, t, s, eta)
    angle = eta * (math.pi / 2)
    mean = (1 - s) * velocity_to_x0(x, v, t) + s * angle.cos() * velocity_to_eps(x, v, t)
    return _step(mean, s * angle.sin(), noise, x_next)


def flow_dance_step(x: Tensor, v: Tensor, t: Coef, s: Coef, eta: Coef, noise: Maybe = None,
                    x_next: Maybe = None) -> Step:  # fmt: skip
    """DanceGRPO (2505.07818), h = t-s, constant diffusion: std = eta sqrt(h),
    mean = x - h v - eta^2 h eps / (2 t) with eps = x + (1-t) v. eta = 0 is the Euler step.
    """
    x, v, t, s, eta = _prepare(x, v, t, s, eta)
    h = t - s
    pull = eta**2 / 2 * h / torch.where(t > 0, t, 1.0)  # a step from t = 0 has h = 0: no 0 / 0
    mean = x - h * v - pull * velocity_to_eps(x, v, t)
    return _step(mean, eta * h.sqrt(), noise, x_next)


def ddim_step(x: Tensor, eps: Tensor, abar_t: Coef, abar_s: Coef, eta: Coef, noise: Maybe = None,
              x_next: Maybe = None) -> Step:  # fmt: skip
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


def group_advantages(r: Tensor, G: int, std: Std = "group", eps: float = 1e-4,
                     clip: float | None = None) -> Tensor:  # fmt: skip
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
    logp, logp_old = _prepare(logp, logp_old.detach())
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
    picks = [torch.randint(len(c), (1,), generator=generator, device=device) for c in chunks]
    return torch.cat([c[pick] for c, pick in zip(chunks, picks)])


def denoising_error(
    pred: Tensor, target: Tensor, weight: Literal["none", "self"] | Tensor = "none"
) -> Tensor:
    """mean (pred - target)^2 over elements -> (B,); a tensor weight, (B,), multiplies it.
    "self" divides by sg(mean |pred - target|) clamped at 1e-5: V-GRPO (2604.23380) Eq. 14, but
    with the MEAN of squares (paper: sum). ValueError: unequal shapes, another word.
    """
    if pred.shape != target.shape:
        raise ValueError(f"pred {tuple(pred.shape)} and target {tuple(target.shape)} differ")
    pred, target = _prepare(pred, target)
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


# ==== Part II: models (one small interface over diffusers' pipelines) =============================

Cond = dict[str, Tensor]  # prompt condition, batch first
Row = dict[str, Any]  # one line of a prompt file: prompt and metadata
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_JOINT_ATTENTION = (*_ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
_FEED_FORWARD = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
_EVERY_LINEAR = _JOINT_ATTENTION + _FEED_FORWARD
_CLIP = {"geneval_soft": {"clip": True}}
_PHOTO = {name: {"detector": "mask2former"} for name in ("geneval", "geneval_soft")}


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """What diffusers' own configs do not say about a model."""

    pipeline: str  # class of diffusers
    weights: str  # hub id, or a folder beside this file
    resolution: int  # pixels; never above what the network was built for
    text_tokens: int  # max_sequence_length of the pipeline: T5 tokens (zeros where there is no T5)
    lora_targets: tuple[str, ...]  # suffixes of module names
    reward_options: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


_SD3, _SD, _FLUX = "StableDiffusion3Pipeline", "StableDiffusionPipeline", "FluxPipeline"
MODELS = {
    # differs: unclipped, one extra object could cost more than everything else is worth
    "tiny": ModelSpec(_SD3, "tiny/sd3", 64, 1, _EVERY_LINEAR, _CLIP),
    "tiny-sd": ModelSpec(_SD, "tiny/sd", 64, 10, _ATTENTION + _FEED_FORWARD[:2], _CLIP),
    # official: flow_grpo@9745241, config/grpo.py: 512 px, T5 length 128, attention only
    "sd35m": ModelSpec(
        _SD3, "stabilityai/stable-diffusion-3.5-medium", 512, 128, _JOINT_ATTENTION, _PHOTO
    ),
    # official: flow_grpo@9745241, scripts/train_flux.py: feed-forward layers as well
    "flux": ModelSpec(_FLUX, "black-forest-labs/FLUX.1-dev", 512, 128, _EVERY_LINEAR, _PHOTO),
    # official: ddpo-pytorch@1958463: LoRA on the attention layers
    "sd15": ModelSpec(
        _SD, "stable-diffusion-v1-5/stable-diffusion-v1-5", 512, 77, _ATTENTION, _PHOTO
    ),
    "sd14": ModelSpec(_SD, "CompVis/stable-diffusion-v1-4", 512, 77, _ATTENTION, _PHOTO),
}


def find_weights(model: str, weights: str | None = None) -> str:
    """A local folder or a hub id; SystemExit in one line, before anything heavy is imported."""
    source = weights or MODELS[model].weights
    folder = Path(source) if weights else Path(__file__).parent / source
    if (folder / "model_index.json").is_file():
        return str(folder)
    local = folder.exists() or source.startswith((".", "/", "~")) or source.count("/") != 1
    refuse_if(local, "weights", f"{source} holds no model_index.json of a diffusers pipeline")
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(source, "model_index.json", etag_timeout=10)
    except Exception as error:
        why = f"cannot reach {source} ({type(error).__name__}); where there is a network, accept "
        why += f"its licence, run `hf download {source} --local-dir FOLDER` and pass "
        raise SystemExit(f"--model {model}: {why}--weights FOLDER") from None
    return source


class Policy:
    """A diffusers text-to-image pipeline whose network carries a trainable fp32 LoRA.

    Noise levels t are 1 at pure noise and 0 at the clean image for every model: sigma of a
    rectified flow, (k + 1) / 1000 at timestep k of a variance-preserving model.
    """

    def __init__(self, pipe: Any, spec: ModelSpec, device: str, r: int, alpha: int) -> None:
        from peft import LoraConfig

        self.pipe, self.spec, self.device = pipe, spec, torch.device(device)
        self.part = "unet" if spec.pipeline == _SD else "transformer"
        self.net = getattr(pipe, self.part).to(device).requires_grad_(False).eval()
        self.dtype = self.net.dtype  # of the base, not of the LoRA
        self.vae = pipe.vae.to(device, torch.float32).requires_grad_(False).eval()
        self.vae.to(memory_format=torch.channels_last)  # half the time of a decode on a CPU
        names = [name for name, _ in self.net.named_modules()]
        for target in spec.lora_targets:
            if not any(name.endswith("." + target) for name in names):
                raise SystemExit(f"LoRA target {target!r} matches no module of the network")
        lora: Any = dict(target_modules=list(spec.lora_targets), init_lora_weights="gaussian")
        self.net.add_adapter(LoraConfig(r=r, lora_alpha=alpha, **lora))
        self.params = [p for p in self.net.parameters() if p.requires_grad]
        for p in self.params:
            p.data = p.data.float()
        self.network = self.net  # torch.compile replaces it
        self.behaviour: Callable[[], Any] = nullcontext  # weights that draw the rollouts
        self.calls = 0  # images sent through the network; guidance sends each twice
        self.kept: list[Tensor] | None = None  # of remember()
        self._encodings: dict[str, Cond] = {}
        config, packed = self.net.config, spec.pipeline == _FLUX  # FLUX: 2 x 2 latents a token
        side = spec.resolution // pipe.vae_scale_factor
        side = side if packed else min(side, config.sample_size)
        self.pixels = side * pipe.vae_scale_factor  # of a side of the image
        tokens, C = (side // 2) ** 2, config.in_channels
        self.latent_shape: tuple[int, ...] = (tokens, C) if packed else (C, side, side)  # one image
        clean, abar = torch.ones(1), getattr(pipe.scheduler, "alphas_cumprod", None)
        self.abars = None if abar is None else torch.cat([clean, abar]).to(device)  # at 1000 t

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Cond:
        """Prompt condition on the device, cached; encoders visit the device only on a miss."""
        missing = [p for p in dict.fromkeys(prompts) if p not in self._encodings]
        named = [getattr(self.pipe, f"text_encoder{n}", None) for n in ("", "_2", "_3")]
        encoders = [e for e in named if e is not None and missing]
        for encoder in encoders:
            encoder.to(self.device).eval()
        for prompt in missing:  # alone: an encoding must not depend on its neighbours
            self._encodings[prompt] = {k: x.cpu() for k, x in self._encode(prompt).items()}
        for encoder in encoders:
            encoder.to("cpu")
        rows = [self._encodings[p] for p in prompts]
        return {k: torch.cat([row[k] for row in rows]).to(self.device) for k in rows[0]}

    def _encode(self, prompt: str) -> Cond:
        encode, length = self.pipe.encode_prompt, dict(max_sequence_length=self.spec.text_tokens)
        if self.spec.pipeline == _SD:
            return {"tokens": encode(prompt, self.device, 1, False)[0]}
        if self.spec.pipeline == _FLUX:
            tokens, pooled, _ = encode(prompt, device=self.device, **length)
        else:
            off = dict(do_classifier_free_guidance=False)
            tokens, _, pooled, _ = encode(prompt, None, None, device=self.device, **off, **length)
        return {"tokens": tokens, "pooled": pooled}

    def noised(self, x0: Tensor, eps: Tensor, t: Coef) -> tuple[Tensor, Tensor]:
        """x_t = a x0 + b eps and its velocity, with (a, b) of `coefficients`."""
        a, b = (_expand(coef, x0) for coef in self.coefficients(t))
        v = eps - x0 if self.abars is None else a * eps - b * x0
        return a * x0 + b * eps, v

    def coefficients(self, t: Coef) -> tuple[Tensor, Tensor]:
        """(a, b) of x_t = a x0 + b eps; an error dv of the velocity is b dv in x0, a dv in eps."""
        t = torch.as_tensor(t, device=self.device)
        if self.abars is None:
            return 1 - t, t
        abar = self.abar(t)
        return abar.sqrt(), (1 - abar).sqrt()

    def velocity(self, x_t: Tensor, t: Coef, c: Cond, guidance: float = 1.0) -> Tensor:
        """Velocity, fp32 like x_t: eps - x0 of a flow, sqrt(abar) eps - sqrt(1-abar) x0 of an eps
        model. Guidance 1 costs one forward, any other value two (FLUX, guidance embedded: one).
        """
        pred = self.predict(x_t, t, c, guidance)
        return pred if self.abars is None else eps_to_velocity(x_t, pred, self.abar(t))

    def predict(self, x_t: Tensor, t: Coef, c: Cond, guidance: float = 1.0) -> Tensor:
        """What the network itself predicts: a flow's velocity or an eps model's noise."""
        t = torch.as_tensor(t, dtype=torch.float32, device=x_t.device)
        timestep = 1000 * t if self.abars is None else (1000 * t).round() - 1
        return self._guided(x_t, timestep, c, guidance)

    def abar(self, t: Coef) -> Tensor:
        """abar of an eps model at noise level t."""
        assert self.abars is not None
        t = torch.as_tensor(t, dtype=torch.float32, device=self.device)
        return self.abars[(1000 * t).round().long()]

    def _guided(self, x_t: Tensor, timestep: Tensor, c: Cond, guidance: float) -> Tensor:
        timestep = timestep.to(x_t.device).expand(len(x_t))
        if guidance == 1 or self.spec.pipeline == _FLUX:
            return self._forward(x_t, timestep, c, guidance)
        empty = self.encode([""])  # unconditional half first, as the stock pipeline
        c = {k: torch.cat([x.expand_as(c[k]), c[k]]) for k, x in empty.items()}
        uncond, cond = self._forward(x_t.repeat(2, 1, 1, 1), timestep.repeat(2), c, 1.0).chunk(2)
        return uncond + guidance * (cond - uncond)

    def _forward(self, x_t: Tensor, timestep: Tensor, c: Cond, guidance: float) -> Tensor:
        self.calls += len(x_t)
        tokens = c["tokens"].to(self.dtype)
        more: Any = {"pooled_projections": c["pooled"].to(self.dtype)} if "pooled" in c else {}
        if self.spec.pipeline == _FLUX:
            side = math.isqrt(self.latent_shape[0])
            ids = self.pipe._prepare_latent_image_ids(1, side, side, self.device, self.dtype)
            more["guidance"] = torch.full_like(timestep, guidance)
            more |= dict(img_ids=ids, txt_ids=ids.new_zeros(tokens.shape[1], 3))
            timestep = timestep / 1000
        x_t = x_t.to(self.dtype)
        inputs = (x_t,) if self.part == "unet" else ()
        more |= {} if inputs else {"hidden_states": x_t}
        return self.network(
            *inputs, timestep=timestep, encoder_hidden_states=tokens, return_dict=False, **more
        )[0].float()  # fmt: skip

    def scheduler(self, solver: str, T: int) -> Any:
        """A fresh scheduler, T steps set: the pipeline's own Euler flow (DDIM of an eps model), or
        DPM-Solver++ of second order (dpm2).
        """
        import diffusers

        dpm, config, steps = diffusers.DPMSolverMultistepScheduler, self.pipe.scheduler.config, {}
        if self.spec.pipeline == _FLUX:
            from diffusers.pipelines.flux.pipeline_flux import calculate_shift as shift_of

            names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
            mu = shift_of(self.latent_shape[0], *(config[name] for name in names))
            steps = dict(sigmas=[1 - i / T for i in range(T)], mu=mu)
        if self.abars is not None:
            kind = diffusers.DDIMScheduler if solver == "euler" else dpm
            scheduler: Any = kind.from_config(config)
        elif solver == "euler":
            scheduler = type(self.pipe.scheduler).from_config(config)
        else:
            shift = math.exp(steps.pop("mu")) if steps else config.shift
            steps = {}
            flow: Any = dict(prediction_type="flow_prediction", use_flow_sigmas=True)
            scheduler = dpm(flow_shift=shift, **flow)
        scheduler.set_timesteps(**(steps or dict(num_inference_steps=T)))
        return scheduler

    def grid(self, T: int, solver: str = "euler") -> Tensor:
        """Noise levels (T + 1,), fp32, falling: those of the stock pipeline, bit for bit."""
        scheduler = self.scheduler(solver, T)
        if self.abars is None:
            return scheduler.sigmas.to(self.device)
        # DDIM ends at abar = 1 or, in Stable Diffusion's own configuration, at that of timestep 0
        last = -1 if scheduler.config.get("set_alpha_to_one", True) else 0
        return (torch.tensor([*scheduler.timesteps, last], device=self.device) + 1) / 1000

    @torch.no_grad()
    def sample(self, x: Tensor, c: Cond, T: int, guidance: float = 1.0, solver: str = "euler",
               p_mix: float = 1.0) -> Tensor:  # fmt: skip
        """x0 from noise x by a diffusers scheduler; from step p_mix T on by the base (MixGRPO)."""
        scheduler = self.scheduler(solver, T)
        for i, timestep in enumerate(scheduler.timesteps):
            with self.reference() if i >= p_mix * T else nullcontext():
                pred = self._guided(x, timestep.float(), c, guidance)
            x = scheduler.step(pred, timestep, x, return_dict=False)[0]
        return x

    @torch.no_grad()
    def decode(self, x0: Tensor) -> Tensor:
        """Images (B, 3, H, W), fp32 in [0, 1]; eight at a time, which stay in a CPU's cache."""
        config, x0 = self.vae.config, x0.float()
        if self.spec.pipeline == _FLUX:
            x0 = self.pipe._unpack_latents(x0, self.pixels, self.pixels, self.pipe.vae_scale_factor)
        parts = (x0 / config.scaling_factor + (config.shift_factor or 0)).split(8)
        return torch.cat([(self.vae.decode(x).sample / 2 + 0.5).clamp(0, 1) for x in parts])

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """Clean latents x0 of images (B, 3, H, W) in [0, 1]: the mode of the VAE's posterior."""
        config, out = self.vae.config, self.vae.encode((2 * images - 1).to(self.device))
        x0 = out.latents if hasattr(out, "latents") else out.latent_dist.mode()
        x0 = (x0 - (config.shift_factor or 0)) * config.scaling_factor
        return self.pipe._pack_latents(x0, *x0.shape) if self.spec.pipeline == _FLUX else x0

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The frozen base: the adapter is off inside, and what was trainable stays trainable."""
        self.net.disable_adapters()
        try:
            yield
        finally:
            self.net.enable_adapters()

    @torch.no_grad()
    def remember(self, decay: float = 0.0) -> None:
        """Keep the adapter frozen for `old()`: a copy, or decay * kept + (1 - decay) * adapter."""
        kept = self.kept or self.params
        self.kept = [p.lerp(q, decay) for p, q in zip(self.params, kept)]

    def old(self) -> AbstractContextManager[None]:
        """The remembered policy, for no-grad passes."""
        if self.kept is None:
            raise RuntimeError("Policy.old: call remember() first")
        return swapped(self.params, self.kept)

    def save_lora(self, folder: Path, **settings: Any) -> None:
        """A LoRA that `pipe.load_lora_weights(folder)` reads back exactly, and settings.json."""
        from diffusers.training_utils import _collate_lora_metadata
        from peft.utils import get_peft_model_state_dict

        layers = {f"{self.part}_lora_layers": get_peft_model_state_dict(self.net)}
        metadata = _collate_lora_metadata({self.part: self.net})
        tmp = folder.with_name(folder.name + ".tmp")
        self.pipe.save_lora_weights(str(tmp), **layers, **metadata)
        folder.mkdir(parents=True, exist_ok=True)
        for file in tmp.iterdir():
            file.replace(folder / file.name)
        tmp.rmdir()
        write_atomic(folder / "settings.json", json.dumps(settings, indent=1))


@contextmanager
def swapped(params: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Put `values` in place of `params` and bring the exact originals back, exceptions included."""
    kept = [p.detach().clone() for p in params]  # clone: on a CPU .cpu() would alias the weights
    copy_into(params, values)
    try:
        yield
    finally:
        copy_into(params, kept)


@torch.no_grad()
def copy_into(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Overwrite each of `params` in place."""
    for p, value in zip(params, values, strict=True):
        p.copy_(value)


def load_policy(model: str, weights: str | None = None, device: str = "cpu",
                dtype: torch.dtype = torch.float32, lora_r: int = 16, lora_alpha: int = 32,
                seed: int = 0, gradient_checkpointing: bool = False,
                compile: bool = False) -> Policy:  # fmt: skip
    """Load a pipeline of diffusers by hub id or folder and attach a LoRA, Gaussian by `seed`."""
    source = find_weights(model, weights)
    import diffusers
    import transformers

    for library in (diffusers, transformers):  # their bars and notices would bury the run's lines
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    index = Path(source) / "model_index.json"
    listed = json.loads(index.read_text()) if index.is_file() else {}
    # diffusers wants what a local folder leaves out (the T5 of tiny) to be passed as None
    absent: Any = {name: None for name, part in listed.items() if part == [None, None]}
    spec = MODELS[model]
    other = listed.get("_class_name", spec.pipeline)
    refuse_if(other != spec.pipeline, "weights", f"{source} is a {other}, not a {spec.pipeline}")
    if spec.pipeline == _SD:
        absent |= dict(safety_checker=None, requires_safety_checker=False)
    pipe = getattr(diffusers, spec.pipeline).from_pretrained(
        source, dtype={"vae": torch.float32, "default": dtype}, **absent
    )
    distilled = spec.pipeline == _FLUX and not pipe.transformer.config.guidance_embeds
    refuse_if(distilled, "weights", f"{source} is distilled to a few steps: training blurs it")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Policy(pipe, spec, device, lora_r, lora_alpha)
    if gradient_checkpointing:
        policy.net.enable_gradient_checkpointing()
    if compile:
        policy.network = torch.compile(policy.net)
    return policy


# ==== Part III: runs (noise, ranks, rewards, evaluation, settings, run folder) ====================


def keyed_seed(*key: int | str) -> int:
    """A 63-bit seed that depends on every part of the key."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


def keyed_noise(shape: Sequence[int], seed: int, purpose: str, iteration: int,
                indices: Iterable[int], step: int = 0) -> Tensor:  # fmt: skip
    """Standard normal (len(indices), *shape), CPU, a function of its key; indices are global."""
    seeds = [keyed_seed(seed, purpose, iteration, index, step) for index in indices]
    generators = [torch.Generator().manual_seed(s) for s in seeds]
    return torch.stack([torch.randn(*shape, generator=g) for g in generators])


def prompt_rows(rows: Sequence[Row], P: int, G: int, seed: int, iteration: int) -> list[Row]:
    """P * G prompt rows, the G of a group adjacent: shuffled passes over all rows in turn."""
    n, picks, order = len(rows), range(iteration * P, (iteration + 1) * P), {}
    for k in {i // n for i in picks}:  # the passes that these picks fall into
        g = torch.Generator().manual_seed(keyed_seed(seed, "prompts", k))
        order[k] = torch.randperm(n, generator=g).tolist()
    return [rows[order[i // n][i % n]] for i in picks for _ in range(G)]


def trained_levels(grid: Tensor, t_min: float, t_max: float, M: int) -> Tensor:
    """The levels within t_min..t_max, never the clean end; refused if too few for M pairs."""
    levels = grid[:-1][(grid[:-1] >= t_min) & (grid[:-1] <= t_max)]
    why = f"{M} pairs, but only {len(levels)} noise levels lie in t_min..t_max"
    refuse_if(len(levels) < M, "M", why)
    return levels


def take(batch: dict[str, Tensor], rows: Tensor | slice) -> dict[str, Tensor]:
    """These rows of every tensor."""
    return {k: x[rows] for k, x in batch.items()}


def micro_batches(c: Cond, indices: range, size: int) -> Iterator[tuple[Cond, range]]:
    """(condition, global sample indices) in slices of at most `size`."""
    for i in range(0, len(indices), size):
        yield take(c, slice(i, i + size)), indices[i : i + size]


def cat_batches(parts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the tensors of micro-batches."""
    first, *others = parts
    return {k: torch.cat([x, *(part[k] for part in others)]) for k, x in first.items()}


def merge_logs(logs: Iterable[dict[str, float]]) -> dict[str, float]:
    """Mean of every statistic, weighted by its row's `images`; the largest of those named max."""
    columns: dict[str, list[tuple[float, float]]] = {}
    for row in logs:
        for key, value in row.items():
            columns.setdefault(key, []).append((value, row.get("images", 1)))
    columns.pop("images", None)
    merged = {k: sum(x * n for x, n in c) / sum(n for _, n in c) for k, c in columns.items()}
    return {k: max(columns[k])[0] if k.endswith("max") else x for k, x in merged.items()}


class Ranks:
    """torch.distributed if torchrun started us, else one process. Ranks own whole groups."""

    def __init__(self, device: str) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        self.device = device
        if self.world > 1:
            if device == "cuda":
                self.device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
                torch.cuda.set_device(self.device)
            torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
            # Its threads must end before the interpreter does, or a rank that is done may abort.
            atexit.register(torch.distributed.destroy_process_group)

    def mine(self, n: int) -> range:
        """The contiguous share of n items that this rank owns (n divisible by the world size)."""
        return range(self.rank * n // self.world, (self.rank + 1) * n // self.world)

    def gather(self, x: Any) -> list[Any]:
        """One picklable object (or CPU tensor) a rank, in rank order, on every rank."""
        out = [x] * self.world
        if self.world > 1:
            torch.distributed.all_gather_object(out, x)
        return out

    def average_gradients(self, params: Sequence[Tensor]) -> None:
        """Mean of the gradients over ranks by one flat all-reduce; an absent one counts as 0."""
        if self.world > 1:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            flat = torch.cat([g.flatten() for g in grads])
            torch.distributed.all_reduce(flat)
            for p, g in zip(params, torch.split(flat / self.world, [p.numel() for p in params])):
                p.grad = g.view_as(p).clone()


def combine_rewards(values: Tensor, weights: Sequence[float], G: int,
                    mode: Literal["advantage", "reward"], std: Std = "group",
                    clip: float | None = None, histories: Sequence[RewardHistory] = (),
                    ids: Sequence[int] = ()) -> Tensor:  # fmt: skip
    """Advantages (B,) of rewards (N, B), 0 for a sample that failed in any. "advantage": normalise
    each, then weight and add (scaling a reward changes nothing); "reward": weighted sum first.
    With `histories` (one a reward) against those of the prompts `ids` instead of the group.
    """

    def normalise(r: Tensor, n: int) -> Tensor:
        return histories[n].advantages(ids, r) if histories else group_advantages(r, G, std=std)

    w = torch.as_tensor(weights, dtype=torch.float64)[:, None]
    values = values.masked_fill(~values.isfinite().all(0), math.nan).double()
    if mode == "reward":
        A = normalise((w * values).sum(0), 0)
    else:
        A = (w * torch.stack([normalise(r, n) for n, r in enumerate(values)])).sum(
            0
        ) / w.abs().sum()
    return (A if clip is None else A.clamp(-clip, clip)).float()


EVAL_SEED = 0  # the same noise for every script and every --seed, so that runs can be compared
TWINS = 16  # prompts drawn twice for eval/diversity: the std of the two latents, mean over elements
SHORT = {"geneval": "strict", "geneval_soft": "soft"}  # eval/strict, eval/soft


@torch.no_grad()
def evaluate(policy: Policy, rewards: dict[str, Any], rows: Sequence[Row], args: Any, ranks: Ranks,
             p_mix: float = 1.0) -> tuple[dict[str, float], list[Row]]:  # fmt: skip
    """(eval/ means over all `rows`, a record a picture); fixed noise, deterministic sampler."""
    from rewards import score

    records, sampler = [], (args.eval_T, args.eval_guidance, args.solver, p_mix)
    mine = range(ranks.rank, len(rows), ranks.world)  # every prompt exactly once, also when ragged
    for chunk in (mine[i : i + args.micro_batch] for i in range(0, len(mine), args.micro_batch)):
        prompts = [rows[i]["prompt"] for i in chunk]
        c = policy.encode(prompts)
        eps = keyed_noise(policy.latent_shape, EVAL_SEED, "eval", 0, chunk).to(policy.device)
        x0 = policy.sample(eps, c, *sampler)
        images = policy.decode(x0).cpu()
        values = score(rewards, images, [rows[i] for i in chunk]).T.tolist()
        x_t, _ = policy.noised(x0, eps, 0.5)  # kl_ref: how far the policy has left the base
        v = policy.velocity(x_t, 0.5, c)
        with policy.reference():
            kl = _mean((v - policy.velocity(x_t, 0.5, c)).square()).tolist()
        spread = [math.nan] * len(chunk)
        if n := sum(i < TWINS for i in chunk):  # the first of the chunk
            eps = keyed_noise(policy.latent_shape, EVAL_SEED, "twin", 0, chunk[:n])
            twins = policy.sample(eps.to(policy.device), take(c, slice(n)), *sampler)
            spread[:n] = _mean(torch.stack([x0[:n], twins]).std(0)).tolist()
        columns = dict(index=chunk, prompt=prompts, image=images, values=values, kl=kl, std=spread)
        records += [dict(zip(columns, record)) for record in zip(*columns.values())]
    records = sorted((r for part in ranks.gather(records) for r in part), key=lambda r: r["index"])
    metrics = {"eval/kl_ref": fmean(r["kl"] for r in records)}
    metrics["eval/diversity"] = fmean(r["std"] for r in records[:TWINS])
    for name, column in zip(rewards, torch.tensor([r["values"] for r in records]).T):
        found = column[column.isfinite()]
        metrics[f"eval/{SHORT.get(name, name)}"] = float(found.mean())
        if len(found) > 1 and name == (args.heldout_reward or next(iter(rewards))):
            metrics["eval/heldout_se"] = float(found.std()) / len(found) ** 0.5
    return metrics, records


class Ema:
    """Moving average of the LoRA for evaluation and export; rollouts use the raw weights."""

    def __init__(self, params: Sequence[Tensor], cap: float, every: int = 8) -> None:
        self.params, self.cap, self.every, self.n = params, cap, every, 0
        self.values = [p.detach().clone() for p in params]

    @torch.no_grad()
    def update(self) -> None:
        """Call once after every optimizer step."""
        if (self.n + 1) % self.every == 0:  # official: flow_grpo@9745241
            decay = min(self.cap, (1 + self.n) / (10 + self.n))
            for value, p in zip(self.values, self.params):
                value.lerp_(p, 1 - decay)
        self.n += 1

    def active(self) -> AbstractContextManager[None]:
        """The averaged weights in place of the live ones; with cap 0 the live ones themselves."""
        # differs: official code shows the untrained base until the first average
        averaged = self.cap > 0 and self.n >= self.every
        return swapped(self.params, self.values) if averaged else nullcontext()


# ---- settings ----

# What may differ from the saved run on --resume: nothing that changes a number.
RESUME_MAY_CHANGE = {"iterations", "save_every", "max_fail", "out", "resume", "overwrite", "track"}


def refuse_if(bad: bool, flag: str, why: str) -> None:
    """Leave with one line that names the flag."""
    if bad:
        raise SystemExit(f"--{flag.replace('_', '-')}: {why}")


def check_positive(args: Any, *flags: str, zero: tuple[str, ...] = ()) -> None:
    """Refuse what is not absent, None or a positive number; those in `zero` may be 0."""
    for flag in (*flags, *zero):
        value = getattr(args, flag, None)
        bad = value is not None and not (0 < value < math.inf or (value == 0 and flag in zero))
        refuse_if(bad, flag, f"{value} is not a positive number{' or 0' if flag in zero else ''}")


def parse_args(cls: Any, presets: dict[str, dict[str, Any]], script: str, doc: str) -> Any:
    """Defaults < the preset of --model, or the settings of the run to --resume < flags."""
    import argparse

    import tyro

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag, default in dict(model=cls().model, resume=None, iterations=None).items():
        first.add_argument(f"--{flag}", default=default)
    given = first.parse_known_args()[0]
    unknown = given.model not in presets
    refuse_if(unknown, "model", f"unknown model {given.model!r}; known: {', '.join(presets)}")
    saved = _saved_args(Path(given.resume), cls, script) if given.resume else {}
    base = saved or {"model": given.model, **presets[given.model]}
    args = tyro.cli(cls, default=dataclasses.replace(cls(), **base), description=doc)
    args.micro_batch = min(args.micro_batch, args.P * args.G)  # as it was saved
    annealed = {"iterations"} if saved.get("anneal_lr") else set[str]()  # they set the rate
    for key in saved.keys() - RESUME_MAY_CHANGE | annealed:
        new, name = getattr(args, key), key.replace("_", "-")
        why = f"the run in {given.resume} has --{name} {saved[key]}, not {new}; drop that flag"
        refuse_if(new != saved[key], "resume", why)
    refuse_if(bool(args.curriculum and given.iterations), "iterations", "the stages have their own")
    names = "+".join(part.partition(":")[0] for part in args.reward.split(","))
    names = Path(args.curriculum).stem if args.curriculum else names
    args.out = args.resume or args.out or f"runs/{script}-{args.model}-{names}-s{args.seed}"
    return args


def _saved_args(folder: Path, cls: Any, script: str) -> dict[str, Any]:
    complete = all((folder / name).is_file() for name in ("args.json", "state.pt"))
    refuse_if(not complete, "resume", f"{folder} holds no saved run (args.json and state.pt)")
    try:
        saved: dict[str, Any] = json.loads((folder / "args.json").read_text())
    except ValueError:
        raise SystemExit(f"--resume: {folder}/args.json is not valid JSON") from None
    refuse_if(saved.pop("script", "") != script, "resume", f"{folder} is no run of {script}.py")
    other = saved.keys() ^ {f.name for f in dataclasses.fields(cls)}
    why = f"{folder}/args.json has other settings than this version: {sorted(other)}"
    refuse_if(bool(other), "resume", why)
    return saved


def check_args(args: Any) -> None:
    """Refuse impossible settings in one line that names the flag, before any model is loaded."""
    from rewards import check_name, parse_rewards

    check_positive(args, "P", "micro_batch", "T", "eval_T", "lora_r", "lora_alpha", "eval_prompts",
                   "eval_every", "save_every", "lr", "guidance", "eval_guidance", "max_grad_norm",
                   "adv_clip")  # fmt: skip
    refuse_if(args.iterations < 0, "iterations", f"{args.iterations} is negative")
    refuse_if(args.G < 2, "G", f"a group of {args.G} has no advantage; use 2 or more")
    world = int(os.environ.get("WORLD_SIZE", 1))
    refuse_if(args.P % world > 0, "P", f"{args.P} groups cannot be shared by {world} processes")
    for flag in ("ema", "max_fail", "weight_decay"):
        value = getattr(args, flag)
        refuse_if(not 0 <= value <= 1, flag, f"{value} is outside 0..1")
    parse_rewards(args.reward)
    if args.heldout_reward:
        check_name(args.heldout_reward, "heldout-reward")
    kind, out = args.device.partition(":")[0], Path(args.out)
    usable = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    refuse_if(kind not in usable, "device", f"no {args.device} here; use --device {usable[0]}")
    no_wandb = importlib.util.find_spec("wandb") is None
    refuse_if(args.track and no_wandb, "track", "needs wandb: pip install wandb")
    # rank 0 makes the folder, perhaps before the others look
    if os.environ.get("RANK", "0") == "0" and out.exists() and not args.resume:
        refuse_if(not args.overwrite, "out", f"{out} exists; add --resume {out} or --overwrite")
        foreign = not (out / "args.json").is_file() and (out.is_file() or any(out.iterdir()))
        refuse_if(foreign, "overwrite", f"{out} is not deleted: no run folder, it has no args.json")
    find_weights(args.model, args.weights)


# ---- curriculum ----

# What no stage can change: the model, the evaluation (best/ compares its numbers), the files.
FIXED = {
    "model", "weights", "heldout_reward", "curriculum", "solver", "lora_r", "lora_alpha", "pairs",
    "eval_prompts", "eval_guidance", "eval_T", "p_mix", "save_every", "max_fail", "seed", "device",
    "dtype", "gradient_checkpointing", "compile", "out", "resume", "overwrite", "track",
}  # fmt: skip


class Stage(NamedTuple):
    """A part of a run: its first iteration, settings, training prompts, weights and rewards."""

    first: int
    args: Any
    train: list[Row]
    weights: dict[str, float]
    rewards: dict[str, Any]


def override(args: Any, stage: dict[str, Any], check_own: Callable[[Any], None]) -> Any:
    """Args with the fields of a stage; refused, by name, if unknown, fixed or impossible."""
    kinds = get_type_hints(type(args))
    free = ", ".join(name for name in kinds if name not in FIXED)
    for field, value in stage.items():
        refuse_if(field not in kinds, field, f"no such setting; a stage can set {free}")
        refuse_if(field in FIXED, field, "cannot change inside a run; give it as a flag")
        allowed = get_args(kinds[field]) or (kinds[field],)
        found = value if get_origin(kinds[field]) is Literal else type(value)
        fits = found in allowed or (found is int and float in allowed)
        refuse_if(not fits, field, f"{value!r} is not {type(args).__annotations__[field]}")
    refuse_if(stage.get("iterations", 0) < 1, "iterations", "a stage needs a number of 1 or more")
    own = dataclasses.replace(args, **stage)
    check_args(own)
    check_own(own)
    return own


def load_stages(args: Any, check_own: Callable[[Any], None],
                device: str) -> tuple[list[Stage], dict[str, Any], list[Row]]:  # fmt: skip
    """(stages, one without --curriculum; rewards to evaluate, which can score what follows; the
    held-out rows of --prompts). Sets args.iterations. A refusal names stage and field.
    """
    from rewards import check_rows, load_rewards, parse_rewards, read_splits, read_stages, scorable

    stages, heldout, first = list[Stage](), read_splits(args.prompts)[1], 0
    for where, stage in read_stages(args.curriculum, args.resume):
        try:
            own = override(args, stage, check_own) if where else args
            train = read_splits(own.prompts)[0]
            stages.append(Stage(first, own, train, parse_rewards(own.reward), {}))
        except SystemExit as error:  # it names a flag
            flag, _, why = str(error).partition(": ")
            field = flag.replace("--", "").replace("-", "_")
            raise SystemExit(f"{where}, {field}: {why}" if where else error.code) from None
        first += own.iterations
    names = [*(name for _, _, _, weights, _ in stages for name in weights), args.heldout_reward]
    loaded = load_rewards(names, MODELS[args.model].reward_options, device)
    for _, _, train, weights, rewards in stages:
        rewards |= {name: loaded[name] for name in weights}
        check_rows(rewards, train)
        for number, row in enumerate(train):
            row["id"] = number
    args.iterations = first
    required = [args.heldout_reward] if args.curriculum else loaded
    return stages, scorable(loaded, heldout, required), heldout


# ---- run folder ----

HEALTH = ("clip_fraction", "kl_ref", "grad_norm", "diversity", "stage")
SHOWN = ("stage", "reward/mean", "reward/fail_frac", "eval/strict", "eval/soft", "clip_fraction",
         "grad_norm", "seconds")  # fmt: skip


def decline(rows: Sequence[Row], key: str) -> str:
    """The warning after the last row, an evaluation, or "": held-out `key` was below its start
    three times in a row; or three times below its best by more than the standard errors of both
    (eval/heldout_se), while the training reward of the stage has risen since.
    """
    seen, se = [row for row in rows if key in row], "eval/heldout_se"
    start, best, late = seen[0], max(seen, key=lambda row: row[key]), seen[-3:]
    since = [row for row in rows[rows.index(best) :] if row.get("stage") == late[-1].get("stage")]
    reward = [row["reward/mean"] for row in since if "reward/mean" in row]
    half = len(reward) // 2
    fell = all(best[key] - r[key] > math.hypot(best.get(se, 0), r.get(se, 0)) for r in late)
    hacked = fell and half > 0 and fmean(reward[-half:]) > fmean(reward[:half])
    if not hacked and not all(row[key] < start[key] for row in late):
        return ""
    path = f"was {best[key]:.3f} at iteration {best['iteration']} (best/), is {late[-1][key]:.3f}"
    line = f"WARNING: held-out {key.removeprefix('eval/')} {path}, lower in the last 3 evaluations"
    return line + (", while the training reward rose: over-optimisation" if hacked else "")


class Run:
    """The run folder; as a context manager it leaves curves.png and lora/ however the run ends."""

    def __init__(self, args: Any, script: str, ranks: Ranks, policy: Policy, optimizer: Any,
                 ema: Ema, stages: Sequence[Stage]) -> None:  # fmt: skip
        self.args, self.ranks, self.policy, self.stages = args, ranks, policy, stages
        self.histories: Sequence[RewardHistory] = ()
        self.optimizer, self.ema, self.started = optimizer, ema, [*stages]
        self.folder, self.writes, self.stop = Path(args.out), ranks.rank == 0, False
        self.done, self.rows, self.wandb = 0, list[dict[str, float]](), None
        if args.resume:
            self._load()
        if not self.writes:
            return
        if args.overwrite and not args.resume and self.folder.exists():
            shutil.rmtree(self.folder)
        (self.folder / "samples").mkdir(parents=True, exist_ok=True)
        text = json.dumps({"script": script, **dataclasses.asdict(args)}, indent=1)
        write_atomic(self.folder / "args.json", text)
        if args.curriculum:  # what --resume reads, whatever becomes of the file
            table = [{k: v for k, v in vars(s.args).items() if k not in FIXED} for s in stages]
            write_atomic(self.folder / "curriculum.json", json.dumps({"stages": table}, indent=1))
        lines = "".join(json.dumps(row) + "\n" for row in self.rows)
        write_atomic(self.folder / "metrics.jsonl", lines)
        size = sum(p.numel() for p in policy.params)
        print(f"{self.folder}: {size:,} trained parameters, from iteration {self.done}", flush=True)
        if args.track:
            import wandb

            self.wandb = wandb.init(project="diffusion-rl", config=vars(args))

    def keep(self, histories: Sequence[RewardHistory]) -> None:
        """Save these with the state of the run; those of a resumed run are filled."""
        self.histories = histories
        for history, saved in zip(histories, self.saved_histories if self.args.resume else ()):
            history.load_state_dict(saved)

    def __enter__(self) -> Run:
        self.before = {n: signal.signal(n, self._stop) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.writes and isinstance(error, SystemExit):  # before the update of an iteration
            self._save()
            print(f"stopped after iteration {self.done}; go on with --resume {self.folder}")
        if self.writes:
            draw_curves(self.rows, self.folder / "curves.png")
            self._save_lora("lora")

    def _stop(self, number: int, frame: Any) -> None:
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True
        print("\nstopping after this iteration (once more: at once)", file=sys.stderr, flush=True)

    def iterations(self) -> Iterator[int]:
        """Iterations to do, until done or interrupted; saves every save_every, for exact resume."""
        from tqdm import tqdm

        todo, total = range(self.done, self.args.iterations), self.args.iterations
        off = not (self.writes and sys.stderr.isatty())
        self.bar = tqdm(todo, initial=self.done, total=total, disable=off, unit="it")
        for iteration in self.bar:
            yield iteration
            self.done, self.stop = iteration + 1, any(self.ranks.gather(self.stop))
            if self.stop or self.done == total or self.done % self.args.save_every == 0:
                self._save()
            if self.stop:
                break

    def stage(self, iteration: int) -> Stage:
        """The stage of this iteration; its lr, weight decay and ema hold from now on."""
        self.started = [stage for stage in self.stages if stage.first <= iteration]
        first, a, *_ = stage = self.started[-1]
        lr = a.lr * (1 - (iteration - first) / a.iterations) if a.anneal_lr else a.lr
        self.optimizer.param_groups[0].update(lr=lr, weight_decay=a.weight_decay)
        self.ema.cap = a.ema
        return stage

    def evaluate(self, iteration: int, rewards: dict[str, Any], rows: Sequence[Row],
                 p_mix: float = 1.0) -> dict[str, float]:  # fmt: skip
        """Evaluate, draw, keep best/ by the held-out reward, warn loudly of a decline."""
        rows = rows[: self.args.eval_prompts]
        with self.ema.active():
            metrics, records = evaluate(self.policy, rewards, rows, self.args, self.ranks, p_mix)
        if not self.writes:
            return metrics
        name = self.args.heldout_reward or next(iter(rewards))
        key, row = f"eval/{SHORT.get(name, name)}", self._row(iteration, metrics)
        if metrics[key] > max((old[key] for old in self.rows if key in old), default=-math.inf):
            self._save_lora("best")
        if key in row and (line := decline([*self.rows, row], key)):
            print(line, file=sys.stderr, flush=True)
        known, sheet = dict(*self.rows[-1:]) | row, self.folder / f"samples/{iteration:05d}.png"
        shown = ("iteration", "stage", "reward/mean", key, "eval/diversity", "eval/kl_ref")
        title = " | ".join(f"{k} {known[k]:.3g}" for k in shown if k in known)
        draw_samples(records[:18], list(rewards), sheet, title)
        draw_curves([*self.rows, row], self.folder / "curves.png")
        return metrics

    def _row(self, iteration: int, metrics: dict[str, float]) -> Row:
        stage = {"stage": len(self.started)} if self.args.curriculum else {}
        finite = {k: v for k, v in metrics.items() if math.isfinite(v)}
        return {"iteration": iteration, **stage, **finite}

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        """Append one strict-JSON line; a number that is not finite is left out."""
        row = self._row(iteration, metrics)
        self.rows.append(row)
        if not self.writes:
            return
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        if self.wandb is not None:
            self.wandb.log(row, step=iteration)
        shown = " | ".join(f"{k} {row[k]:.4g}" for k in SHOWN if k in row)
        if self.bar.disable:
            print(f"[{iteration}/{self.args.iterations}] {shown}", flush=True)
        else:
            self.bar.set_postfix_str(shown)

    def _save(self) -> None:
        if self.writes:
            state = dict(
                params=[p.detach() for p in self.policy.params], done=self.done, rows=self.rows,
                ema=self.ema.values, ema_n=self.ema.n, optimizer=self.optimizer.state_dict(),
                kept=self.policy.kept, histories=[h.state_dict() for h in self.histories],
            )  # fmt: skip
            torch.save(state, self.folder / "state.tmp")
            (self.folder / "state.tmp").replace(self.folder / "state.pt")
            self._save_lora("lora")

    def _load(self) -> None:
        state = torch.load(self.folder / "state.pt", weights_only=True, map_location="cpu")
        copy_into([*self.policy.params, *self.ema.values], [*state["params"], *state["ema"]])
        self.optimizer.load_state_dict(state["optimizer"])
        self.ema.n, self.done, self.rows = state["ema_n"], state["done"], state["rows"]
        self.saved_histories = state["histories"]
        if state["kept"] is not None:
            self.policy.kept = [p.to(self.policy.device) for p in state["kept"]]

    def _save_lora(self, name: str) -> None:
        keep = ("model", "weights", "guidance", "eval_guidance", "eval_T", "solver", "lora_alpha")
        with self.ema.active():
            settings = {k: getattr(self.started[-1].args, k) for k in keep}
            self.policy.save_lora(self.folder / name, iteration=self.done, **settings)

    def finish(self, rewards: dict[str, Any], rows: Sequence[Row], p_mix: float = 1.0) -> None:
        """The last evaluation, unless interrupted, and the lines that use the trained LoRA."""
        pipe, spec, a = self.policy.pipe, self.policy.spec, self.args
        if not self.stop:
            self.log(self.done, self.evaluate(self.done, rewards, rows, p_mix))
        elif self.writes:
            print(f"stopped after iteration {self.done}; go on with --resume {self.folder}")
        if self.writes:
            absent = "".join(f", {k}=None" for k, part in pipe.components.items() if part is None)
            source, lora = f"{pipe.config._name_or_path!r}{absent}", str(self.folder / "lora")
            print(f"pipe = diffusers.{type(pipe).__name__}.from_pretrained({source})")
            more = "" if spec.pipeline == _SD else f", max_sequence_length={spec.text_tokens}"
            print(f"pipe.load_lora_weights({lora!r})  # then pipe(PROMPT, guidance_scale="
                  f"{a.eval_guidance}, num_inference_steps={a.eval_T}{more}).images")  # fmt: skip


def write_atomic(path: Path, text: str) -> None:
    """Write through a temporary file, then rename."""
    tmp = path.with_suffix(path.suffix + ".tmp")
    tmp.write_text(text)
    tmp.replace(path)


def draw_samples(records: Sequence[Row], names: Sequence[str], path: Path, title: str = "") -> None:
    """A sheet of pictures with the prompt and the rewards under each, and a title line."""
    from matplotlib.figure import Figure

    lines = -(-len(records) // 6)
    figure = Figure(figsize=(10, 2.1 * lines + 0.3), layout="tight")
    figure.suptitle(title, fontsize=9, parse_math=False)
    for k, record in enumerate(records):
        axis = figure.add_subplot(lines, 6, k + 1, xticks=[], yticks=[])
        axis.imshow(record["image"].permute(1, 2, 0).numpy(), interpolation="nearest")
        values = " ".join(f"{SHORT.get(n, n)} {v:.2f}" for n, v in zip(names, record["values"]))
        text = "\n".join([*textwrap.wrap(record["prompt"], 32)[:3], *textwrap.wrap(values, 32)])
        axis.set_xlabel(text, fontsize=7, parse_math=False)  # a prompt may hold a $
    figure.savefig(path, dpi=100)


def draw_curves(rows: Sequence[dict[str, float]], path: Path) -> None:
    """Rewards, evaluation and the health of the update over the iterations, a panel each."""
    from matplotlib.figure import Figure

    panels = {k for row in rows for k in row if k in HEALTH or k.startswith(("reward/", "eval/"))}
    lines = -(-len(panels) // 5)
    figure = Figure(figsize=(16, 2.8 * max(lines, 1)), layout="tight")
    for k, name in enumerate(sorted(panels)):
        axis = figure.add_subplot(lines, 5, k + 1, title=name, xlabel="iteration")
        x = [row["iteration"] for row in rows if name in row]
        axis.plot(x, [row[name] for row in rows if name in row], marker=".")
    figure.savefig(path.with_suffix(".tmp.png"), dpi=90)
    path.with_suffix(".tmp.png").replace(path)
