"""DDPO: denoising diffusion policy optimisation, reinforcement learning of a denoising chain.

DDPO: Black et al., arXiv 2305.13301v4; DPOK: Fan et al., arXiv 2305.16381v3.

Denoising is a Markov decision process: DDIM with eta = 1 draws every step from a Gaussian, whose
log-density depends on the network. The reward of the image, against the running mean of its
prompt's rewards, trains all its steps by PPO's clipped surrogate (DDPO_IS):

    L   = mean over (image, step) of max(-A rho, -A clamp(rho, 1 - clip, 1 + clip))
    rho = exp(logp(x_s | x_t, c) - logp_old),  A = (r - mean_prompt r) / (std_prompt r + 1e-6)

With one update per rollout rho is 1 and L the score-function estimator (DDPO_SF). A rectified flow
steps by the SDE of Flow-GRPO instead, and leaves its last step deterministic.

    python ddpo.py                                         # the shipped tiny-sd, on a CPU
    python ddpo.py --model sd15                            # on a GPU
    python ddpo.py --updates 1                             # DDPO_SF
    python ddpo.py --objective dpok --beta 1e-2            # DPOK's clamp and KL, no value function

Departures are marked `# differs:` and listed in the README. Diff it against flow_grpo.py.
"""

from __future__ import annotations

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

    model: str = "tiny-sd"
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
    eta: float = 1.0
    """noise level of a step: DDIM's eta, or the a of the flow SDE"""
    updates: int = 2
    """optimizer steps per rollout, each on its own share of the images; 1 is DDPO_SF"""
    timestep_fraction: float = 1.0
    """share of the steps that is trained, drawn for every image and iteration"""
    t_min: float = 0.0
    """smallest noise level whose step is trained; late ones have the noisiest gradients (README)"""
    baseline: Literal["history", "group"] = "history"
    """rewards are compared with the last ones of their prompt, or with their group"""
    history: int = 16
    """rewards kept per prompt"""
    min_count: int = 16
    """a prompt with fewer rewards is compared with the whole iteration"""
    clip: float = 1e-4
    """PPO range on rho of the MEAN log-density: depends on the resolution (README, clip table)"""
    train_cfg: bool = True
    """update with the guidance of the rollout, through both halves; off: conditional branch only"""
    objective: Literal["ddpo", "dpok"] = "ddpo"
    """ddpo: PPO's pessimistic clip; dpok: ratio clamped whatever the sign of A; RWR: baselines/"""
    beta: float = 0.0
    """weight of DPOK's KL: squared difference of the predictions to the base's"""
    p_mix: float = 1.0
    """evaluation: share of the steps made by the trained network, the base makes the rest"""


PRESETS: dict[str, dict[str, Any]] = {
    "tiny-sd": dict(  # ours
        reward="geneval_soft:1,geneval:1",  # the strict reward alone draws too many shapes
        iterations=90,
        T=6,
        lr=1e-3,
        ema=0.8,
        eval_every=30,
        t_min=0.3,  # four of six steps; the fifth, into t = 0.002, has a gradient 8 times theirs
        clip=1e-3,
    ),
    "tiny": dict(  # ours
        reward="geneval_soft:1,geneval:1",  # the strict reward alone draws too many shapes
        iterations=100,
        T=8,
        lr=5e-4,
        eval_every=20,
        eta=0.7,
        clip=1e-3,
    ),
    "sd15": dict(  # official: ddpo-pytorch@1958463 config/dgx.py, compressibility, for one GPU
        reward="jpeg_compressibility",
        heldout_reward=None,
        prompts="prompts/imagenet_animals.txt",
        iterations=100,
        P=32,
        G=2,
        micro_batch=8,
        T=50,
        guidance=5.0,
        lr=3e-4,
        lora_r=4,
        lora_alpha=4,
        eval_every=20,
        eval_guidance=5.0,
        eval_T=50,
        save_every=20,
        dtype="bfloat16",  # differs: official code uses float16
    ),
}
PRESETS["sd14"] = PRESETS["sd15"]


def check_own(args: Args) -> None:
    """Refuse impossible settings of this algorithm in one line that names the flag."""
    refuse_if(args.T < 2, "T", f"{args.T} leaves a flow no trained step")
    refuse_if(args.updates > args.P * args.G, "updates", f"{args.updates} is above P * G images")
    own = ("eta", "updates", "timestep_fraction", "history", "min_count", "clip")
    check_positive(args, *own, zero=("beta", "t_min"))
    refuse_if(max(args.timestep_fraction, args.t_min) > 1, "timestep-fraction/--t-min", "above 1")
    refuse_if(not 0 <= args.p_mix <= 1, "p_mix", f"{args.p_mix} is outside 0..1")


SCRIPT = "ddpo"


def parse_args() -> Args:
    """Defaults < preset of --model < flags; impossible settings end here, in one line."""
    args: Args = common.parse_args(Args, PRESETS, SCRIPT, __doc__)
    common.check_args(args)
    check_own(args)
    return args


# ==== 2. Algorithm ================================================================================


def step(
    policy: Policy, x: Tensor, pred: Tensor, t: Tensor, s: Tensor, args: Args,
    noise: Tensor | None = None, x_next: Tensor | None = None,
) -> common.Step:  # fmt: skip
    """One stochastic step t -> s of the model's own kind, or the score of x_next."""
    if policy.abars is None:
        return common.flow_sde_step(x, pred, t, s, args.eta, noise, x_next)
    return common.ddim_step(x, pred, policy.abar(t), policy.abar(s), args.eta, noise, x_next)


@torch.no_grad()
def rollout(
    policy: Policy, c: common.Cond, grid: Tensor, iteration: int, indices: Sequence[int],
    args: Args,
) -> dict[str, Tensor]:  # fmt: skip
    """Sample x0 (B, C, H, W); keep the S stochastic steps: x_t, x_s (B, S, C, H, W), their noise
    levels t, s and logp (B, S).
    """
    x = common.keyed_noise(policy.latent_shape, args.seed, "x_T", iteration, indices)
    x, kept = x.to(policy.device), []
    for i, (t, s) in enumerate(zip(grid[:-1], grid[1:])):
        x_t, pred = x, policy.predict(x, t, c, args.guidance)
        if i < args.T - (policy.abars is None):  # a flow ends with a step of its ODE
            noise = common.keyed_noise(x[0].shape, args.seed, "step", iteration, indices, i)
            x, logp, _, _ = step(policy, x, pred, t, s, args, noise.to(x.device))
            kept.append((x_t, x, t.expand(len(x)), s.expand(len(x)), logp))
        else:
            x = common.euler_step(x, pred, t, s)
    stored = zip(("x_t", "x_s", "t", "s", "logp"), zip(*kept))
    return dict(x0=x) | {name: torch.stack(steps, 1) for name, steps in stored}


def loss(
    policy: Policy, c: common.Cond, batch: dict[str, Tensor], k: int | Tensor, A: Tensor, args: Args
) -> tuple[Tensor, dict[str, Tensor]]:
    """Surrogate of step k, (B,) if it differs, plus beta times the KL; mean over the B images."""
    guidance = args.guidance if args.train_cfg else 1.0
    names, at = ("x_t", "x_s", "t", "s", "logp"), (torch.arange(len(A)), k)
    x_t, x_s, t, s, logp_old = (batch[name][at] for name in names)
    pred = policy.predict(x_t, t, c, guidance)
    _, logp, _, _ = step(policy, x_t, pred, t, s, args, x_next=x_s)
    total, stats = common.clipped_surrogate(logp, logp_old, A, args.clip)
    if args.objective == "dpok":  # no gradient outside the range, also on the way back into it
        rho = (logp - logp_old).clamp(-common.MAX_LOG_RHO, common.MAX_LOG_RHO).exp()
        total = (-A * rho.clamp(1 - args.clip, 1 + args.clip)).mean()
    if args.beta > 0:
        with torch.no_grad(), policy.reference():
            pred_ref = policy.predict(x_t, t, c, guidance)
        kl = common.denoising_error(pred, pred_ref)
        total = total + args.beta * kl.mean()
        stats["kl_ref"] = kl.detach().mean()
    return total, stats


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, ema: common.Ema, batch: dict[str, Tensor],
    c: common.Cond, A: Tensor, valid: Tensor, iteration: int, args: Args, ranks: Ranks,
) -> list[dict[str, float]]:  # fmt: skip
    """`updates` optimizer steps, each on its own share of all ranks' images, steps in any order."""
    logs: list[dict[str, float]] = []
    # A sample without advantage has no policy gradient: only a KL would need its forward.
    # differs: it keeps its weight in the mean; official code drops it and reweighs the others.
    live = valid if args.beta > 0 else valid & (A != 0)
    g = torch.Generator().manual_seed(common.keyed_seed(args.seed, "shuffle", iteration))
    first, steps = ranks.rank * len(A), max(int((batch["t"][0] >= args.t_min).sum()), 1)
    order = torch.rand(ranks.world * len(A), steps, generator=g).argsort(1)[first : first + len(A)]
    steps = max(int(steps * args.timestep_fraction), 1)
    for whole in torch.randperm(ranks.world * len(A), generator=g).chunk(args.updates):
        share = whole[(whole >= first) & (whole < first + len(A))] - first
        share = share[live[share]]
        if sum(ranks.gather(len(share))) == 0:
            continue
        optimizer.zero_grad()
        for rows in share.split(args.micro_batch) if len(share) else ():
            part = take(c, rows), take(batch, rows)
            for k in order[rows, :steps].T:  # (B,)
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
    histories = {
        k: [common.RewardHistory(a.history, a.min_count) for _ in weights if a.baseline != "group"]
        for k, a, _, weights, _ in stages
    }
    run = Run(args, SCRIPT, ranks, policy, optimizer, ema, stages)
    run.keep([history for stage in histories.values() for history in stage])
    with run:
        for iteration in run.iterations():
            start, metrics = time.time(), dict[str, float]()
            first, args, train, weights, rewards = run.stage(iteration)
            if iteration % args.eval_every == 0:
                metrics |= run.evaluate(iteration, watched, heldout, args.p_mix)

            # ---- prompts and rollout ----
            rows = common.prompt_rows(train, args.P, args.G, args.seed, iteration)
            ids = [row["id"] for row in rows]
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
                everyone, list(weights.values()), args.G, args.combine, args.adv_std, args.adv_clip,
                histories[first], ids,
            )[mine.start : mine.stop]  # fmt: skip
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
