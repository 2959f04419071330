"""DGPO: direct group preference optimisation, reinforcement learning without a policy gradient.

DGPO: arXiv 2510.08425v1; Diffusion-DPO, its case G = 2: arXiv 2311.12908.

The images of a prompt are split by the sign of their advantage; the better ones are to be
preferred to the worse ones as a group. Any ODE solver draws them, and no density of a step is
needed, only denoising errors of the trained network and of a reference at shared (t, eps):

    S   = beta_dpo / G  sum over the group of A (err - err_ref)
    L   = -log sigmoid(-S),  A = (r - mean_group r) / (std r + 1e-4)
    dL  = beta_dpo  mean over the group of sigmoid(S) A d err

The released code, and this file, train mean sigmoid(S) A err with a fixed sigmoid: L / beta_dpo.

    python dgpo.py                                         # the shipped tiny model, on a CPU
    python dgpo.py --t-min 0.3 --ref ema                   # cleaner noise levels, moving reference
    python dgpo.py --G 2 --clip None                       # Diffusion-DPO on its own samples
    python dgpo.py --pairs FILE --G 2 --beta-dpo 5000      # Diffusion-DPO on a file of pairs
    python dgpo.py --model sd35m --weights FOLDER          # on a GPU

Eps models (sd15) are compared in v-form, without the noisiest levels: no paper validates that.
Departures are marked `# differs:` and listed in the README. Diff it against vgrpo.py.
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
from rewards import load_pairs, reward_metrics, score

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
    """(t, eps) pairs per image, the levels drawn without replacement"""
    t_min: float = 0.4
    """smallest noise level that is trained: cleaner ones blur the pictures"""
    t_max: float = 1.0
    """largest one; an eps model amplifies its errors by 14 at 1, take 0.95"""
    share: Literal["group", "batch", "none"] = "group"
    """images that see the same pairs: of one prompt, all, or every image its own"""
    space: Literal["x", "v", "eps"] = "v"
    """what the error compares: clean latents, velocities or noises"""
    weight: Literal["self", "none", "ghuber", "t"] = "none"
    """of an error: over its own mean absolute value (V-GRPO), 1, AWM's root, or t"""
    rollout: Literal["policy", "ema"] = "policy"
    """who draws the images: the trained weights, or their moving average (--ema)"""
    K: int = 1
    """gradient steps per rollout, each on all images and the same pairs"""
    beta_dpo: float = 100.0
    """strength of the preference: how soon a separated group is left alone"""
    ref: Literal["base", "ema"] = "base"
    """reference of the preference: the frozen base, or a fast moving average of the LoRA"""
    clip: float | None = None
    """an error whose ratio to the moving average's has moved this far is not pushed further"""
    beta: float = 0.0
    """weight of the KL to the base, in velocities"""
    ref_guidance: float = 1.0
    """guidance of the base in the KL and, as the reference, in the preference"""
    train_guidance: float = 1.0
    """guidance of the update; 1 trains the conditional branch alone, as all official code"""
    pairs: str | None = None
    """.jsonl of prompt, winner, loser (image files) to train on instead of rollouts; needs --G 2"""
    p_mix: float = 1.0
    """evaluation: share of the steps made by the trained network, the base makes the rest"""


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(  # ours: after bench/sweeps.md
        reward="geneval_soft:1,geneval:1",  # the strict reward alone draws too many shapes
        iterations=220,  # nine minutes on two cores
        T=8,
        lr=2e-3,
        anneal_lr=True,
        max_grad_norm=0.05,  # twice the usual one
        ema=0.8,
        eval_every=20,
        M=2,
        t_min=0.5,  # three of the eight noise levels; at pure noise there is little to learn
        t_max=0.95,
        beta_dpo=30.0,  # at 100 separated groups are left alone too soon
        beta=0.01,  # without it, it drifts away from 100 iterations on
    ),
    "tiny-sd": dict(  # ours: as tiny; no paper trains an eps model this way
        reward="geneval_soft:1,geneval:1",
        iterations=100,
        T=8,
        ema=0.8,
        eval_every=20,
        M=3,
        t_max=0.95,
        beta_dpo=30.0,
        beta=0.003,
    ),
    "sd35m": dict(  # official: DGPO@01ceb4b config/dgpo.py, the OCR row
        reward="jpeg_compressibility",  # ours: needs no other model
        heldout_reward=None,
        prompts="prompts/animals.txt",  # ours: DDPO's 45 animals
        iterations=500,  # ours
        P=8,
        G=16,
        micro_batch=8,  # ours
        T=10,
        guidance=4.5,
        solver="dpm2",
        lr=3e-4,
        lora_r=64,
        lora_alpha=128,
        adv_std="global",
        ema=0.9,
        eval_every=30,
        eval_guidance=4.5,
        eval_T=40,
        save_every=30,
        t_min=0.65,  # its index 6 of 10, shift 3
        clip=1e-2,
        beta=0.02,
        dtype="bfloat16",
    ),
    "flux": dict(  # ours: no paper trains FLUX this way; batch and LoRA as sd35m
        reward="jpeg_compressibility",
        heldout_reward=None,
        prompts="prompts/animals.txt",
        iterations=500,
        P=8,
        G=16,
        micro_batch=2,
        T=10,
        guidance=3.5,  # embedded in the network: one forward
        lr=3e-4,
        lora_r=64,
        lora_alpha=128,
        ema=0.9,
        eval_every=30,
        eval_guidance=3.5,
        eval_T=28,
        save_every=30,
        beta=0.02,
        train_guidance=3.5,
        ref_guidance=3.5,
        dtype="bfloat16",
        gradient_checkpointing=True,
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
    own = ("M", "K", "beta_dpo", "clip", "train_guidance", "ref_guidance")
    check_positive(args, *own, zero=("beta",))
    refuse_if(args.rollout == "ema" and args.ema == 0, "rollout", "ema wants an --ema above 0")
    refuse_if(not 0 <= args.p_mix <= 1, "p_mix", f"{args.p_mix} is outside 0..1")
    refuse_if(bool(args.pairs) and args.G != 2, "pairs", "a pair is a group of 2; add --G 2")


SCRIPT = "dgpo"


def parse_args() -> Args:
    """Defaults < preset of --model < flags; impossible settings end here, in one line."""
    args: Args = common.parse_args(Args, PRESETS, SCRIPT, __doc__)
    common.check_args(args)
    check_own(args)
    return args


# ==== 2. Algorithm ================================================================================


def preference_loss(
    err: Tensor, err_ref: Tensor, A: Tensor, G: int, beta: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """mean of w A err, w = sigmoid(beta / G sum over the group of A (err - err_ref)) held fixed:
    1 / beta times the objective -log sigmoid(-S). err (B,) or (M, B) of whole groups, one w each.
    mask True: that error keeps its value and loses its gradient. Errors of A = 0 are not read.
    """
    gap = torch.where(A == 0, 0, err.detach() - err_ref)
    w = torch.sigmoid(beta / G * (A * gap).unflatten(-1, (-1, G)).sum(-1))  # (P,)
    if mask is not None:
        err = torch.where(mask, err.detach(), err)
    return (w.repeat_interleave(G, -1) * A * torch.where(A == 0, 0, err)).mean(), w


def draw_pairs(
    policy: Policy, grid: Tensor, iteration: int, indices: Sequence[int], args: Args
) -> tuple[Tensor, Tensor]:
    """M pairs per image: t (B, M) out of the grid, eps (B, M, C, H, W)."""
    keys = [{"group": i // args.G, "batch": 0, "none": i}[args.share] for i in indices]
    n, picks = len(grid), {}
    for key in set(keys):
        g = torch.Generator().manual_seed(common.keyed_seed(args.seed, "t", iteration, key))
        picks[key] = torch.randperm(n, generator=g)[: args.M]
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
    x0 = c.get("x0")  # of --pairs
    if x0 is None:
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
    needed = dict(ref=args.ref == "base" or args.beta > 0, ema=args.ref == "ema" or bool(args.clip))
    other: dict[str, Any] = dict(old=policy.behaviour, ref=policy.reference, ema=policy.old)
    out = {}
    for name in (name for name, need in needed.items() if need):
        with other[name]():
            guidance = args.ref_guidance if name == "ref" else args.train_guidance
            out[f"err_{name}"], out[f"v_{name}"] = errors(policy, c, batch, args, guidance)
    return out


def weigh(errs: list[Tensor], stays: list[dict[str, Any]], A: Tensor, args: Args) -> None:
    """Add slope (M, b), d loss / d err, to micro-batches of whole groups; A (B,), errs (M, b)."""
    err, rows = torch.cat(errs, 1), torch.cat([x["rows"] for x in stays])
    err_ref = torch.cat([x["err_ema" if args.ref == "ema" else "err_ref"] for x in stays], 1)
    mask = torch.zeros_like(err)
    if args.clip is not None:
        rho = (torch.cat([x["err_ema"] for x in stays], 1) - err).exp()
        mask = torch.where(A > 0, rho > 1 + args.clip, rho < 1 - args.clip).to(err)
    full = err.new_zeros(4, args.M, (int(rows.max()) // args.G + 1) * args.G)  # 0: nothing is read
    full[:, :, rows] = torch.stack([err, err_ref, A.expand_as(err), mask])
    leaf, err_ref, A, masked = full
    total, w = preference_loss(leaf.requires_grad_(), err_ref, A, args.G, args.beta_dpo, masked > 0)
    slope = full.shape[2] * torch.autograd.grad(total, leaf)[0][:, rows]
    stats = dict(clip_fraction=mask.mean(), w_mean=w[:, rows // args.G].mean())
    for x, part in zip(stays, slope.split([err.shape[1] for err in errs], 1)):
        x |= dict(slope=part, stats=stats)


def loss(
    policy: Policy, c: common.Cond, batch: dict[str, Tensor], A: Tensor, fixed: dict[str, Any],
    args: Args,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Errors times their slopes (the gradient of the preference loss) plus the KL to the base."""
    err, v = errors(policy, c, batch, args, args.train_guidance)
    if "slope" not in fixed:  # this micro-batch holds whole groups
        weigh([err.detach()], [fixed], A, args)
    total, stats = (fixed.pop("slope") * err).sum(0).mean(), fixed["stats"].copy()
    if args.beta > 0:
        kl = (v - fixed["v_ref"]).square()
        total = total + args.beta * kl.mean()
        stats["kl_ref"] = kl.detach().mean()
    return total, stats


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, ema: common.Ema, batch: dict[str, Tensor],
    c: common.Cond, A: Tensor, valid: Tensor, iteration: int, args: Args, ranks: Ranks,
) -> list[dict[str, float]]:  # fmt: skip
    """K optimizer steps on all images and the same pairs."""
    logs: list[dict[str, float]] = []
    # A sample without advantage has no policy gradient: only a KL would need its forward.
    live = valid if args.beta > 0 else valid & (A != 0)
    if sum(ranks.gather(int(live.sum()))) == 0:
        return logs
    chunks = [rows for rows in live.nonzero().flatten().split(args.micro_batch) if len(rows)]
    parts = [(take(c, rows), take(batch, rows)) for rows in chunks]
    stays = [frozen(policy, *part, args) | {"rows": x} for x, part in zip(chunks, parts)]
    for k in range(args.K):
        optimizer.zero_grad()
        if len(chunks) > 1 and (args.micro_batch % args.G or not live.all()):  # groups are split
            with torch.no_grad():
                errs = [errors(policy, *part, args, args.train_guidance)[0] for part in parts]
            weigh(errs, stays, A[live].to(policy.device), args)
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
    if args.pairs:
        stages, pictures = load_pairs(args.pairs, stages)
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
            if args.pairs:
                given = pictures(rows, policy.pixels).split(args.micro_batch)
                c["x0"] = torch.cat([policy.encode_images(x) for x in given])
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
