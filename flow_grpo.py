"""Flow-GRPO: group relative policy optimisation of flow models by turning their ODE into an SDE.

Flow-GRPO: Liu et al., arXiv 2505.05470v5; MixGRPO: Li et al., arXiv 2507.21802v2; CPS,
Coefficients-Preserving Sampling: arXiv 2509.05952.

Denoising is a Markov decision process. The Euler step of the flow ODE becomes a step of an SDE with
the same marginals, so that each step has a Gaussian log-density; the advantage of an image against
the other images of its prompt then trains every stochastic step by PPO's clipped surrogate:

    L = mean over (image, step) of max(-A rho, -A clamp(rho, 1 - clip, 1 + clip)) + beta KL(base)
    rho = exp(logp(x_s | x_t, c) - logp_old),  A = (r - mean_group r) / (std r + 1e-4)

    python flow_grpo.py                                    # the shipped tiny model, on a CPU
    python flow_grpo.py --window 0                         # train all steps but the last
    python flow_grpo.py --window-schedule random --sde cps --a 0.8          # Flow-GRPO-Fast
    python flow_grpo.py --window 4 --window-schedule progressive            # MixGRPO
    python flow_grpo.py --model sd35m --weights FOLDER                      # on a GPU

Departures are marked `# differs:` and listed in the README. Diff it against vgrpo.py.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import common
from common import Policy, Ranks, Run, check_positive, refuse_if, take
from rewards import reward_metrics, score

# ==== 1. Settings =================================================================================


@dataclass
class Args:
    """Settings; presets per model below override these defaults, flags override both."""

    model: str = "tiny"
    """tiny, tiny-sd (shipped, for a CPU), sd35m, flux, sd15, sd14: a preset"""
    weights: str | None = None
    """hub id or local folder instead of the model's own"""
    reward: str = "geneval_soft"
    """reward to train on, or several: NAME:WEIGHT,NAME:WEIGHT"""
    combine: Literal["advantage", "reward"] = "advantage"
    """several rewards: add normalised advantages, or raw rewards"""
    heldout_reward: str | None = "geneval"
    """reward whose mean on the held-out prompts chooses best/"""
    prompts: str = "tiny/prompts"
    """folder with train.jsonl and heldout.jsonl, or one .jsonl / .txt file for both"""
    iterations: int = 100
    """rollouts"""
    curriculum: str | None = None
    """.json of stages that change prompts, reward, iterations and other settings in turn"""
    P: int = 6
    """prompts per iteration"""
    G: int = 16
    """images per prompt"""
    micro_batch: int = 96
    """images per forward; changes memory and nothing else"""
    T: int = 10
    """denoising steps of a rollout"""
    guidance: float = 1.0
    """classifier-free guidance of rollout and update; 1 is off and costs one forward"""
    solver: Literal["euler", "dpm2"] = "euler"
    """deterministic sampler of the evaluation"""
    lr: float = 1e-3
    """AdamW learning rate"""
    anneal_lr: bool = False
    """let it fall linearly to 0 over the iterations (of a stage)"""
    lora_r: int = 16
    """LoRA rank"""
    lora_alpha: int = 32
    """LoRA alpha; the update is scaled by alpha / r"""
    weight_decay: float = 1e-4
    """AdamW weight decay"""
    max_grad_norm: float = 1.0
    """gradient clipping"""
    adv_std: Literal["group", "global", "none"] = "global"
    """advantages are divided by the std of their group, of the iteration, or not"""
    adv_clip: float | None = 5.0
    """advantages are clamped to +- this"""
    ema: float = 0.0
    """cap of the LoRA's moving average used in evaluation and export; 0 is off"""
    eval_every: int = 10
    """iterations between evaluations"""
    eval_prompts: int = 48
    """held-out prompts per evaluation"""
    eval_guidance: float = 1.0
    """guidance of the evaluation"""
    eval_T: int = 20
    """steps of the evaluation"""
    save_every: int = 10
    """iterations between saved states"""
    max_fail: float = 0.25
    """stop when a larger share of an iteration's rewards failed"""
    seed: int = 0
    """seed of LoRA, prompts and noise"""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """cpu, cuda"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """of the frozen base; the LoRA and all mathematics are float32"""
    gradient_checkpointing: bool = False
    """less memory, one more forward"""
    compile: bool = False
    """torch.compile the network"""
    out: str = ""
    """run folder (default: runs/SCRIPT-MODEL-REWARD-sSEED)"""
    resume: str | None = None
    """run folder to continue, bit for bit on a CPU"""
    overwrite: bool = False
    """delete the run folder first if it exists"""
    track: bool = False
    """log to wandb as well"""

    # ---- this algorithm only ----
    sde: Literal["sde", "cps", "dance"] = "sde"
    """stochastic step: Flow-GRPO's SDE, coefficients-preserving, DanceGRPO's"""
    a: float = 0.7
    """noise level of the step (eta for cps and dance)"""
    window: int = 0
    """stochastic, trained steps per rollout, the others are ODE steps; 0 = all but the last"""
    window_schedule: Literal["random", "progressive", "frozen"] = "random"
    """where the window starts: anywhere (Fast), moving on with time (MixGRPO), at window-lo"""
    window_lo: int = 0
    """first step the window may cover"""
    window_hi: int = 0
    """end (exclusive) of the steps the window may cover; 0 = T - 1"""
    window_every: int = 25
    """progressive: iterations between two moves of the window"""
    window_stride: int = 1
    """progressive: steps per move"""
    same_latent: bool = False
    """one initial noise per group (MixGRPO); the noise of the steps stays independent"""
    updates: int = 2
    """optimizer steps per rollout, each on its own share of the images"""
    clip: float = 1e-4
    """PPO range on rho of the MEAN log-density: depends on the resolution (README, clip table)"""
    beta: float = 0.0
    """weight of the KL to the base; 0 makes no reference forward"""
    kl: Literal["official", "exact"] = "official"
    """official: step size times the exact per-element KL; published betas belong to it"""
    train_guidance: float | None = None
    """guidance of the update if it must differ from the rollout's: rho is then not 1 on-policy"""
    p_mix: float = 1.0
    """evaluation: share of the steps made by the trained network, the base makes the rest"""


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(  # ours: after bench/sweeps.md
        reward="geneval_soft:1,geneval:1",  # the strict reward alone draws too many shapes
        iterations=160,  # six minutes on two cores
        T=8,
        lr=4e-4,
        ema=0.9,  # the last forty iterations or so
        eval_every=20,
        window=3,  # the first three steps decide what is drawn where
        window_schedule="frozen",
        same_latent=True,  # then the whole spread of a group is due to the trained steps
        clip=1e-3,  # 1 024 latent elements: 2.8 in the true ratio, see the README's table
    ),
    "sd35m": dict(  # official: flow_grpo@9745241 config/grpo.py, the one-GPU OCR row
        reward="jpeg_compressibility",  # ours: needs no other model
        heldout_reward=None,
        prompts="prompts/animals.txt",  # DDPO's 45 animals
        P=8,  # 64 images an epoch
        G=8,
        micro_batch=8,
        T=10,
        guidance=4.5,
        lr=3e-4,
        lora_r=32,
        lora_alpha=64,
        adv_std="global",
        ema=0.9,
        eval_every=60,
        eval_guidance=4.5,
        eval_T=40,
        save_every=60,
        beta=0.04,  # with the official KL
        clip=1e-4,
        dtype="bfloat16",  # ours: official fp16 autocast over fp32 weights needs more memory
    ),
    "flux": dict(  # official: flow_grpo@9745241 config/grpo.py, the PickScore row
        reward="jpeg_compressibility",  # ours: needs no other model
        heldout_reward=None,
        prompts="prompts/animals.txt",  # ours: DDPO's 45 animals
        P=6,  # ours: 32 GPUs take 48 prompts
        G=24,
        micro_batch=2,  # ours
        T=6,
        guidance=3.5,  # embedded in the network: one forward
        lr=3e-4,
        lora_r=64,
        lora_alpha=128,
        ema=0.9,
        eval_every=30,
        eval_guidance=3.5,
        eval_T=28,
        save_every=30,
        a=0.9,
        clip=1e-4,
        dtype="bfloat16",
        gradient_checkpointing=True,  # ours
    ),
}


def check_own(args: Args) -> None:
    """Refuse impossible settings of this algorithm in one line that names the flag."""
    T, lo, hi = args.T, args.window_lo, args.window_hi or args.T - 1
    refuse_if(T < 2, "T", f"{T} leaves no trained step; the last step is never trained")
    refuse_if(not 0 <= lo < hi < T, "window-lo/--window-hi", f"{lo}..{hi} outside 0..{T - 1}")
    refuse_if(not 0 <= args.window <= hi - lo, "window", f"{args.window} steps not in {lo}..{hi}")
    refuse_if(args.sde == "cps" and args.a > 1, "a", f"noise level {args.a} is above 1 for cps")
    refuse_if(args.updates > args.P * args.G, "updates", f"{args.updates} is above P * G images")
    own = ("a", "updates", "window_every", "window_stride", "clip", "train_guidance")
    check_positive(args, *own, zero=("beta",))
    refuse_if(not 0 <= args.p_mix <= 1, "p_mix", f"{args.p_mix} is outside 0..1")


SCRIPT = "flow_grpo"


def parse_args() -> Args:
    """Defaults < preset of --model < flags; impossible settings end here, in one line."""
    args: Args = common.parse_args(Args, PRESETS, SCRIPT, __doc__)
    common.check_args(args)
    check_own(args)
    return args


# ==== 2. Algorithm ================================================================================

STEPS = {"sde": common.flow_sde_step, "cps": common.flow_cps_step, "dance": common.flow_dance_step}


def window_start(iteration: int, args: Args) -> int:
    """First stochastic step of this iteration, between window_lo and window_hi.
    random: uniform over whole windows (Flow-GRPO-Fast); frozen: lo; progressive (MixGRPO): `stride`
    further every `every` iterations, back to lo at the end.
    # differs: MixGRPO's window is empty for the last start before it rolls back; ours never is.
    """
    lo, hi = args.window_lo, args.window_hi or args.T - 1
    if args.window_schedule == "frozen":
        return lo
    if args.window_schedule == "progressive":
        return lo + iteration // args.window_every * args.window_stride % (hi - lo)
    rng = random.Random(common.keyed_seed(args.seed, "window", iteration))
    return rng.randint(lo, hi - args.window)


def trained_steps(iteration: int, args: Args) -> range:
    """Indices of the steps that are stochastic and trained; all but the last without a window."""
    hi = args.window_hi or args.T - 1  # differs: the first release noised the last step as well
    start = window_start(iteration, args) if args.window else args.window_lo
    return range(start, min(start + (args.window or args.T), hi))


@torch.no_grad()
def rollout(
    policy: Policy, c: common.Cond, grid: Tensor, iteration: int, indices: Sequence[int],
    args: Args,
) -> dict[str, Tensor]:  # fmt: skip
    """Sample x0 (B, C, H, W); keep the S stochastic steps: x_t, x_s (B, S, C, H, W), their noise
    levels t, s and logp (B, S).
    """
    keys = [i // args.G for i in indices] if args.same_latent else indices
    purpose = "group" if args.same_latent else "x_T"
    x = common.keyed_noise(policy.latent_shape, args.seed, purpose, iteration, keys)
    x, steps, kept = x.to(policy.device), trained_steps(iteration, args), []
    for i, (t, s) in enumerate(zip(grid[:-1], grid[1:])):
        x_t, v = x, policy.velocity(x, t, c, args.guidance)
        if i in steps:
            noise = common.keyed_noise(x[0].shape, args.seed, "step", iteration, indices, i)
            x, logp, _, _ = STEPS[args.sde](x, v, t, s, args.a, noise=noise.to(x.device))
            kept.append((x_t, x, t.expand(len(x)), s.expand(len(x)), logp))
        else:
            x = common.euler_step(x, v, t, s)
    stored = zip(("x_t", "x_s", "t", "s", "logp"), zip(*kept))
    return dict(x0=x) | {name: torch.stack(steps, 1) for name, steps in stored}


def loss(
    policy: Policy, c: common.Cond, batch: dict[str, Tensor], k: int | Tensor, A: Tensor, args: Args
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate of step k plus beta times the KL to the base; mean over the B images."""
    guidance = args.guidance if args.train_guidance is None else args.train_guidance
    names, at = ("x_t", "x_s", "t", "s", "logp"), (torch.arange(len(A)), k)
    x_t, x_s, t, s, logp_old = (batch[name][at] for name in names)
    v = policy.velocity(x_t, t, c, guidance)
    _, logp, mean, std = STEPS[args.sde](x_t, v, t, s, args.a, x_next=x_s)
    total, stats = common.clipped_surrogate(logp, logp_old, A, args.clip)
    if args.beta > 0:
        with torch.no_grad(), policy.reference():
            v_ref = policy.velocity(x_t, t, c, guidance)
        mean_ref = STEPS[args.sde](x_t, v_ref, t, s, args.a, x_next=x_s).mean
        kl = common.gaussian_kl(mean, mean_ref, std)
        if args.kl == "official" and args.sde == "sde":
            kl = kl * (t - s)  # official: flow_grpo@9745241 divides by the std without sqrt(h)
        total = total + args.beta * kl.mean()
        stats["kl_ref"] = kl.detach().mean()
    return total, stats


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, ema: common.Ema, batch: dict[str, Tensor],
    c: common.Cond, A: Tensor, valid: Tensor, iteration: int, args: Args, ranks: Ranks,
) -> list[dict[str, float]]:  # fmt: skip
    """`updates` optimizer steps, each on its own share of the images and on all stored steps."""
    logs: list[dict[str, float]] = []
    # A sample without advantage has no policy gradient: only a KL would need its forward.
    # differs: it keeps its weight in the mean; official code drops it and reweighs the others.
    live = valid if args.beta > 0 else valid & (A != 0)
    g = torch.Generator().manual_seed(common.keyed_seed(args.seed, "shuffle", iteration))
    first, steps = ranks.rank * len(A), batch["t"].shape[1]  # shares are drawn over all ranks
    for whole in torch.randperm(ranks.world * len(A), generator=g).chunk(args.updates):
        share = whole[(whole >= first) & (whole < first + len(A))] - first
        share = share[live[share]]
        if sum(ranks.gather(len(share))) == 0:
            continue
        optimizer.zero_grad()
        for rows in share.split(args.micro_batch) if len(share) else ():
            part = take(c, rows), take(batch, rows)
            for k in range(steps):
                value, stats = loss(policy, *part, k, A[rows].to(policy.device), args)
                (ranks.world * len(rows) / len(whole) / steps * value).backward()
                logs.append({"images": len(rows)} | {k: float(x) for k, x in stats.items()})
        ranks.average_gradients(policy.params)
        norm = torch.nn.utils.clip_grad_norm_(policy.params, args.max_grad_norm)
        optimizer.step()
        ema.update()
        logs.append(dict(grad_norm=norm.item()))
    return logs


# ==== 3. Main =====================================================================================


def main(args: Args) -> None:
    """Evaluate -> prompts -> rollout -> reward and advantage -> update -> log, save."""
    ranks = Ranks(args.device)
    stages, watched, heldout = common.load_stages(args, check_own, ranks.device)
    policy = common.load_policy(
        args.model, args.weights, ranks.device, getattr(torch, args.dtype), args.lora_r,
        args.lora_alpha, args.seed, args.gradient_checkpointing, args.compile,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(policy.params, lr=args.lr, weight_decay=args.weight_decay)
    ema = common.Ema(policy.params, args.ema)
    grids = {k: policy.grid(a.T) for k, a, *_ in stages}
    run = Run(args, SCRIPT, ranks, policy, optimizer, ema, stages)
    with run:
        for iteration in run.iterations():
            start, metrics = time.time(), dict[str, float]()
            first, args, train, weights, rewards = run.stage(iteration)
            if iteration % args.eval_every == 0:
                metrics |= run.evaluate(iteration, watched, heldout, args.p_mix)

            # ---- prompts and rollout ----
            rows = common.prompt_rows(train, args.P, args.G, args.seed, iteration)
            mine = ranks.mine(len(rows))
            rows = rows[mine.start : mine.stop]
            c = policy.encode([row["prompt"] for row in rows])
            policy.calls = 0
            batch = common.cat_batches(
                rollout(policy, part, grids[first], iteration, indices, args)
                for part, indices in common.micro_batches(c, mine, args.micro_batch)
            )
            images = torch.cat(
                [policy.decode(x).cpu() for x in batch["x0"].split(args.micro_batch)]
            )

            # ---- reward and advantage ----
            values = score(rewards, images, rows)
            everyone = torch.cat(ranks.gather(values), 1)  # (N, P * G)
            metrics |= reward_metrics(weights, everyone, args.max_fail)
            A = common.combine_rewards(
                everyone, list(weights.values()), args.G, args.combine, args.adv_std, args.adv_clip
            )[mine.start : mine.stop]
            valid = values.isfinite().all(0)

            # ---- update ----
            logs = update(policy, optimizer, ema, batch, c, A, valid, iteration, args, ranks)

            # ---- log, save ----
            diversity = float(batch["x0"].unflatten(0, (-1, args.G)).std(1).mean())
            logs.append(dict(diversity=diversity, nfe=policy.calls / len(rows)))
            metrics |= common.merge_logs([row for part in ranks.gather(logs) for row in part])
            metrics["seconds"] = time.time() - start
            run.log(iteration, metrics)
        run.finish(watched, heldout, args.p_mix)


if __name__ == "__main__":
    main(parse_args())
