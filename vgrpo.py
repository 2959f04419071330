"""V-GRPO: group relative policy optimisation with the ELBO as the likelihood of an image.

V-GRPO: arXiv 2604.23380v1; AWM, advantage weighted matching: arXiv 2509.25050; FPO, flow policy
optimisation: arXiv 2507.21053.

No Markov decision process: any ODE solver draws the images. The denoising error of the final image,
averaged over M pairs (t, eps) that its whole group shares, stands for -log p(x0 | c) in PPO's
clipped surrogate:

    err(x0) = mean over (t, eps) of mean (x0_hat - x0)^2 / sg mean |x0_hat - x0|
    rho     = exp(err_old - err),  A = (r - mean_group r) / (std r + 1e-4), then eta tanh(A / eta)
    L       = mean over images of max(-A rho, -A clamp(rho, 1 - clip, 1 + clip))

    python vgrpo.py                                        # the shipped tiny model, on a CPU
    python vgrpo.py --K 2 --clip 1e-2 --kl-old 0.3         # two steps per rollout, ratio and KL
    python vgrpo.py --share none --no-stratified --weight none --soft-clip None       # naive: FPO
    python vgrpo.py --model sd35m --weights FOLDER         # on a GPU
    # AWM:
    python vgrpo.py --share none --space v --weight ghuber --soft-clip None --kl-ema 1 --beta 1e-3

FPO itself adds --space eps. Open in the paper, chosen here: the KL is a mean over elements, each of
K steps sees all images. Eps models (sd15) are compared in v-form, without the noisiest levels: no
paper validates that. Departures are marked `# differs:`, see the README. Diff it against dgpo.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
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
    M: int = 4
    """(t, eps) pairs per image"""
    share: Literal["group", "batch", "none"] = "group"
    """images that see the same pairs: of one prompt, all, or every image its own"""
    t_min: float = 0.0
    """smallest noise level that is trained"""
    t_max: float = 1.0
    """largest one; an eps model amplifies its errors by 14 at 1, take 0.95"""
    stratified: bool = True
    """one t from each of M chunks of the rollout's noise levels; off: M independent ones"""
    space: Literal["x", "v", "eps"] = "x"
    """what the error compares: clean latents, velocities or noises"""
    weight: Literal["self", "none", "ghuber", "t"] = "self"
    """of an error: over its own mean absolute value (V-GRPO), 1, AWM's root, or t"""
    rollout: Literal["policy", "ema"] = "policy"
    """who draws the images: the trained weights, or their moving average (--ema)"""
    K: int = 1
    """gradient steps per rollout, each on all images and the same pairs"""
    clip: float | None = None
    """PPO range on rho, None is off; acts from the second of K steps on, or with --rollout ema"""
    kl_old: float = 0.0
    """weight of the squared change of x0_hat since the rollout; acts when --clip does"""
    soft_clip: float | None = 3.0
    """eta of A <- eta tanh(A / eta), None is off; breaks the zero sum of a group"""
    beta: float = 0.0
    """weight of the KL to the base, in velocities; 0 makes no reference forward"""
    kl_ema: float = 0.0
    """weight of the KL to a fast moving average of the LoRA (AWM)"""
    ref_guidance: float = 1.0
    """guidance of the base in the KL to it"""
    train_guidance: float = 1.0
    """guidance of the update; 1 trains the conditional branch alone, as all official code"""
    p_mix: float = 1.0
    """evaluation: share of the steps made by the trained network, the base makes the rest"""


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(  # ours: after bench/sweeps.md
        reward="geneval_soft:1,geneval:1",  # the strict reward alone draws too many shapes
        iterations=200,  # about ten minutes on two cores
        T=8,
        lr=1.2e-3,
        anneal_lr=True,
        max_grad_norm=0.06,  # about the usual one; gradients grow later on
        ema=0.8,
        eval_every=20,
        M=3,
        t_min=0.4,  # four of the eight noise levels: what is drawn where
        t_max=0.95,  # at pure noise there is little to learn
        beta=0.05,  # without it, it diverges after 150 iterations: nothing else bounds A < 0
    ),
    "tiny-sd": dict(  # ours: as tiny; no paper trains an eps model this way
        reward="geneval_soft:1,geneval:1",
        iterations=100,
        T=8,
        lr=7e-4,
        ema=0.6,
        eval_every=20,
        M=3,
        t_min=0.4,
        t_max=0.95,
        beta=0.03,
    ),
    "sd35m": dict(  # arXiv 2604.23380, SD3.5-M, first stage; marked ours where it is silent
        reward="jpeg_compressibility",  # ours: needs no other model
        heldout_reward=None,
        prompts="prompts/animals.txt",  # ours: DDPO's 45 animals
        iterations=150,
        P=48,
        G=24,
        micro_batch=8,  # ours
        T=40,
        lr=3e-4,
        lora_r=32,
        lora_alpha=64,
        adv_std="group",  # ours: MixGRPO's, on which the paper's code stands
        adv_clip=None,
        eval_every=30,
        eval_T=40,
        save_every=30,
        dtype="bfloat16",  # ours
    ),
    "flux": dict(  # arXiv 2604.23380, FLUX.1-dev with 16 steps; differs: a LoRA, at 512 pixels
        reward="jpeg_compressibility",  # ours: needs no other model
        heldout_reward=None,
        prompts="prompts/animals.txt",  # ours: DDPO's 45 animals
        iterations=300,
        P=8,
        G=12,
        micro_batch=2,  # ours
        T=16,
        guidance=3.5,  # embedded in the network: one forward
        lr=1e-4,  # ours: the paper's 1e-5 trains all weights
        lora_r=64,  # ours
        lora_alpha=128,  # ours
        adv_std="group",
        adv_clip=None,
        eval_every=30,
        eval_guidance=3.5,
        eval_T=50,
        save_every=30,
        K=4,
        clip=1e-2,
        soft_clip=2.0,
        train_guidance=3.5,
        ref_guidance=3.5,
        p_mix=0.8,
        dtype="bfloat16",
        gradient_checkpointing=True,  # ours
    ),
    "sd15": dict(  # ours: no paper trains an eps model this way
        reward="jpeg_compressibility",
        heldout_reward=None,
        prompts="prompts/animals.txt",
        iterations=150,
        P=8,
        G=8,
        micro_batch=8,
        T=20,
        guidance=5.0,  # DDPO's
        lr=3e-4,
        lora_r=16,
        lora_alpha=16,
        eval_every=30,
        eval_guidance=5.0,
        save_every=30,
        t_max=0.95,
        dtype="bfloat16",
    ),
}
PRESETS["sd14"] = PRESETS["sd15"]


def check_own(args: Args) -> None:
    """Refuse impossible settings of this algorithm in one line that names the flag."""
    refuse_if(args.M > args.T, "M", f"{args.M} pairs of {args.T} noise levels; use 1..{args.T}")
    bad = not 0 <= args.t_min < args.t_max <= 1
    refuse_if(bad, "t-min/--t-max", f"{args.t_min}..{args.t_max} is no range within 0..1")
    own = ("M", "K", "clip", "soft_clip", "train_guidance", "ref_guidance")
    check_positive(args, *own, zero=("kl_old", "beta", "kl_ema"))
    refuse_if(args.rollout == "ema" and args.ema == 0, "rollout", "ema wants an --ema above 0")
    refuse_if(not 0 <= args.p_mix <= 1, "p_mix", f"{args.p_mix} is outside 0..1")


SCRIPT = "vgrpo"


def parse_args() -> Args:
    """Defaults < preset of --model < flags; impossible settings end here, in one line."""
    args: Args = common.parse_args(Args, PRESETS, SCRIPT, __doc__)
    common.check_args(args)
    check_own(args)
    return args


# ==== 2. Algorithm ================================================================================


def soft_clip(A: Tensor, eta: float) -> Tensor:
    """eta tanh(A / eta), Eq. 17: |A| stays below eta, the slope at 0 is 1. It breaks the zero sum
    of a group: one success among 24 loses more than its 23 rivals, a net push away from them all.
    """
    return eta * torch.tanh(A / eta)


def elbo_ratio(err: Tensor, err_old: Tensor) -> Tensor:
    """rho (B,) = exp(mean_M err_old - mean_M err) of errors (M, B): the mean is inside."""
    return (err_old - err).mean(0).clamp(-common.MAX_LOG_RHO, common.MAX_LOG_RHO).exp()


def draw_pairs(
    policy: Policy, grid: Tensor, iteration: int, indices: Sequence[int], args: Args
) -> tuple[Tensor, Tensor]:
    """M pairs per image: t (B, M) out of the grid, eps (B, M, C, H, W)."""
    keys = [{"group": i // args.G, "batch": 0, "none": i}[args.share] for i in indices]
    n, picks = len(grid), {}
    for key in set(keys):
        g = torch.Generator().manual_seed(common.keyed_seed(args.seed, "t", iteration, key))
        picks[key] = torch.randint(n, (args.M,), generator=g)
        if args.stratified:
            picks[key] = common.stratified_indices(n, args.M, g)
    eps = [
        common.keyed_noise(policy.latent_shape, args.seed, "eps", iteration, keys, m)
        for m in range(args.M)
    ]
    t = torch.stack([grid[picks[key]] for key in keys])
    return t, torch.stack(eps, 1).to(policy.device)


@torch.no_grad()
def rollout(
    policy: Policy, c: common.Cond, grid: Tensor, iteration: int, indices: Sequence[int],
    args: Args,
) -> dict[str, Tensor]:  # fmt: skip
    """Sample x0 (B, C, H, W) by an ODE solver; draw its pairs t (B, M), eps (B, M, C, H, W)."""
    x = common.keyed_noise(policy.latent_shape, args.seed, "x_T", iteration, indices)
    with policy.behaviour():
        x0 = policy.sample(x.to(policy.device), c, args.T, args.guidance, args.solver)
    t, eps = draw_pairs(policy, grid, iteration, indices, args)
    return dict(x0=x0, t=t, eps=eps)


def errors(
    policy: Policy, c: common.Cond, batch: dict[str, Tensor], args: Args, guidance: float
) -> tuple[Tensor, Tensor]:
    """Errors (M, B) of the predicted velocities (M, B, C, H, W), in --space and with --weight."""
    found = []
    for t, eps in zip(batch["t"].unbind(1), batch["eps"].unbind(1)):
        x_t, target = policy.noised(batch["x0"], eps, t)
        v = policy.velocity(x_t, t, c, guidance)
        err = common.denoising_error(v, target, "self" if args.weight == "self" else "none")
        a, b = policy.coefficients(t)
        scale = dict(x=b, v=torch.ones_like(b), eps=a)[args.space]  # dx0 = b dv, deps = a dv
        err = err * (scale if args.weight == "self" else scale.square())
        if args.weight == "ghuber":  # official: AWM-code@be51372, power 0.25
            err = ((err + 1e-10) ** 0.25 - 1e-10**0.25) / 0.25
        found.append((t * err if args.weight in ("t", "ghuber") else err, v))
    return torch.stack([err for err, _ in found]), torch.stack([v for _, v in found])


@torch.no_grad()
def frozen(
    policy: Policy, c: common.Cond, batch: dict[str, Tensor], args: Args
) -> dict[str, Tensor]:
    """What stays over the K steps: err_NAME and v_NAME of the other policies, as from errors()."""
    needed = dict(old=args.K > 1 or args.rollout == "ema", ref=args.beta > 0, ema=args.kl_ema > 0)
    other: dict[str, Any] = dict(old=policy.behaviour, ref=policy.reference, ema=policy.old)
    out = {}
    for name in (name for name, need in needed.items() if need):
        with other[name]():
            guidance = args.ref_guidance if name == "ref" else args.train_guidance
            out[f"err_{name}"], out[f"v_{name}"] = errors(policy, c, batch, args, guidance)
    return out


def loss(
    policy: Policy, c: common.Cond, batch: dict[str, Tensor], A: Tensor, fixed: dict[str, Tensor],
    args: Args,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Clipped surrogate of the ELBO ratio plus the KL terms, mean over the B images."""
    err, v = errors(policy, c, batch, args, args.train_guidance)
    rho = elbo_ratio(err, fixed.get("err_old", err.detach()))  # on-policy: no forward for old
    clip = torch.inf if args.clip is None else args.clip
    total, stats = common.clipped_surrogate(rho.log(), torch.zeros_like(rho), A, clip)
    for name, weight in dict(old=args.kl_old, ref=args.beta, ema=args.kl_ema).items():
        if weight > 0 and f"v_{name}" in fixed:
            kl = (v - fixed[f"v_{name}"]).square().flatten(2).mean(2)  # (M, B)
            if name == "old":  # Eq. 16 compares x0: dx0 = b dv
                kl = kl * policy.coefficients(batch["t"].T)[1].square()
            total = total + weight * kl.mean()
            stats["kl_x0" if name == "old" else f"kl_{name}"] = kl.detach().mean()
    return total, stats


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, ema: common.Ema, batch: dict[str, Tensor],
    c: common.Cond, A: Tensor, valid: Tensor, iteration: int, args: Args, ranks: Ranks,
) -> list[dict[str, float]]:  # fmt: skip
    """K optimizer steps on all images and the same pairs."""
    logs: list[dict[str, float]] = []
    # A sample without advantage has no policy gradient: only a KL would need its forward.
    live = valid if args.kl_old + args.beta + args.kl_ema > 0 else valid & (A != 0)
    if sum(ranks.gather(int(live.sum()))) == 0:
        return logs
    chunks = [rows for rows in live.nonzero().flatten().split(args.micro_batch) if len(rows)]
    parts = [(take(c, rows), take(batch, rows)) for rows in chunks]
    stays = [frozen(policy, *part, args) for part in parts]
    for k in range(args.K):
        optimizer.zero_grad()
        for rows, part, fixed in zip(chunks, parts, stays):
            value, stats = loss(policy, *part, A[rows].to(policy.device), fixed, args)
            (len(rows) / len(A) * value).backward()
            logs.append({"images": len(rows)} | {k: float(x) for k, x in stats.items()})
        ranks.average_gradients(policy.params)
        norm = torch.nn.utils.clip_grad_norm_(policy.params, args.max_grad_norm)
        optimizer.step()
        ema.update()
        policy.remember(min(0.3, 1e-3 * (iteration * args.K + k)))  # official: DGPO@01ceb4b, AWM
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
    grids = {
        k: common.trained_levels(policy.grid(a.T, a.solver), a.t_min, a.t_max, a.M)
        for k, a, *_ in stages
    }
    policy.remember()
    run = Run(args, SCRIPT, ranks, policy, optimizer, ema, stages)
    with run:
        for iteration in run.iterations():
            start, metrics = time.time(), dict[str, float]()
            first, args, train, weights, rewards = run.stage(iteration)
            policy.behaviour = ema.active if args.rollout == "ema" else nullcontext
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
            A = A if args.soft_clip is None else soft_clip(A, args.soft_clip)
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
