"""RWR: reward-weighted regression, a model that learns to denoise its own best images.

RWR and RWR_sparse: the baselines of DDPO, Black et al., arXiv 2305.13301v4.

No policy gradient: every iteration draws a new data set from the model as it is, and some passes of
plain denoising over it follow, in which an image counts as much as its reward says:

    L = mean over visits of w mean_d (pred(x_t, t, c) - target)^2,  t uniform, x_t the noised x0
    w = N softmax_N(inverse_temperature r)  (rwr);  1 for the best of a prompt, else 0  (rwr-sparse)

pred and target are noises for an eps model, velocities for a flow. The rollout is that of ddpo.py,
with the same noise; compare the two at equal reward queries, P * G an iteration.

    python -m baselines.rwr                                # the shipped tiny-sd, on a CPU
    python -m baselines.rwr --model sd15                   # on a GPU
    python -m baselines.rwr --objective rwr-sparse --epochs 50    # as many visits as rwr's 5
    python -m baselines.rwr --no-train-cfg --guidance 5    # train the conditional prediction alone

Departures are marked `# differs:` and listed in the README. Diff it against ddpo.py.
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
    """noise level of a step of the rollout: DDIM's eta, or the a of the flow SDE; 0 draws none"""
    objective: Literal["rwr", "rwr-sparse"] = "rwr"
    """rwr: weights by a softmax of the rewards; rwr-sparse: the best of each prompt, unweighted"""
    inverse_temperature: float = 0.2
    """rwr: multiplies the reward in the softmax; 0 weighs all images alike"""
    per_prompt: bool = True
    """rwr: softmax over the images of a prompt; off: over all of the iteration"""
    top_share: float = 0.1
    """rwr-sparse: share of a prompt's images that is kept, more if rewards tie"""
    epochs: int = 5
    """passes over the images of an iteration, each with new noise levels and noises"""
    updates: int = 5
    """optimizer steps per pass, each on its own share of the images, one at least"""
    train_cfg: bool = True
    """update with the guidance of the rollout, through both halves; off: conditional branch only"""


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(  # ours: as tiny-sd
        reward="geneval_soft:1,geneval:1",  # the sum, 0..2
        iterations=20,  # as many reward queries as ddpo.py's 100
        P=30,
        G=16,
        T=8,
        lr=3e-4,
        eval_every=2,
        save_every=1,
        eta=0.7,
        inverse_temperature=4.0,
        updates=1,  # 480 images a step
    ),
    "tiny-sd": dict(  # ours: what loses least of the base's quality, see the README
        reward="geneval_soft:1,geneval:1",
        iterations=18,  # as many reward queries as ddpo.py's 90
        P=30,
        G=16,
        lr=3e-4,
        eval_every=2,
        save_every=1,
        inverse_temperature=4.0,
        updates=1,
    ),
    "sd15": dict(  # official: jannerm/ddpo@f0b6ca7 config/base.py, compressed_animals_rwr
        reward="jpeg_compressibility",
        heldout_reward=None,
        prompts="prompts/imagenet_animals.txt",
        iterations=10,
        P=40,  # ours: 640 images, then as many reward queries as ddpo.py; official 10 240 images
        G=16,
        micro_batch=8,
        T=50,
        guidance=5.0,
        lr=1e-4,  # ours: the official 1e-5 trains all weights
        lora_r=4,
        lora_alpha=4,
        eval_every=1,
        eval_guidance=5.0,
        eval_T=50,
        save_every=1,
        dtype="bfloat16",  # differs: official code uses float32
        per_prompt=False,  # official: True for the aesthetic reward alone
        updates=5,  # 128 images a step
    ),
}
PRESETS["sd14"] = PRESETS["sd15"]


def check_own(args: Args) -> None:
    """Refuse impossible settings of this algorithm in one line that names the flag."""
    check_positive(args, "top_share", "epochs", "updates", zero=("eta", "inverse_temperature"))
    refuse_if(args.top_share > 1, "top_share", f"{args.top_share} is above 1, all images")


SCRIPT = "rwr"


def parse_args() -> Args:
    """Defaults < preset of --model < flags; impossible settings end here, in one line."""
    args: Args = common.parse_args(Args, PRESETS, SCRIPT, __doc__)
    common.check_args(args)
    check_own(args)
    return args


# ==== 2. Algorithm ================================================================================


def top_share(r: Tensor, G: int, share: float) -> Tensor:
    """Mask (B,) of the rewards at or above the (1 - share) quantile of their group of G, which lies
    between two rewards (jannerm/ddpo@f0b6ca7). A non-finite reward is neither kept nor counted.
    """
    groups = r.double().masked_fill(~r.isfinite(), torch.nan).view(-1, G)
    return (groups >= groups.nanquantile(1 - share, 1, keepdim=True)).flatten()


def sample_weights(r: Tensor, args: Args) -> tuple[Tensor, Tensor]:
    """Weights of mean 1 and the mask of the images that are trained on, each (B,), of rewards r."""
    if args.objective == "rwr-sparse":
        return torch.ones(len(r)), top_share(r, args.G, args.top_share)
    groups = torch.arange(len(r)) // args.G if args.per_prompt else None
    return common.rwr_weights(r, args.inverse_temperature, groups).float(), r.isfinite()


@torch.no_grad()
def rollout(
    policy: Policy, c: common.Cond, grid: Tensor, iteration: int, indices: Sequence[int],
    args: Args,
) -> dict[str, Tensor]:  # fmt: skip
    """Sample x0 (B, C, H, W) as ddpo.py does: DDIM with eta, or the SDE of a flow."""
    x = common.keyed_noise(policy.latent_shape, args.seed, "x_T", iteration, indices)
    x = x.to(policy.device)
    for i, (t, s) in enumerate(zip(grid[:-1], grid[1:])):
        pred = policy.predict(x, t, c, args.guidance)
        noise = common.keyed_noise(x[0].shape, args.seed, "step", iteration, indices, i)
        if policy.abars is None:
            eta = args.eta if i < args.T - 1 else 0.0  # a flow ends with a step of its ODE
            x = common.flow_sde_step(x, pred, t, s, eta, noise.to(x.device)).x_next
        else:
            abars = policy.abar(t), policy.abar(s)
            x = common.ddim_step(x, pred, *abars, args.eta, noise.to(x.device)).x_next
    return dict(x0=x)  # differs: official code decodes, stores a JPEG and encodes that again


def loss(
    policy: Policy, c: common.Cond, batch: dict[str, Tensor], t: Tensor, eps: Tensor, w: Tensor,
    args: Args,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Denoising error of x0 at noise levels t (B,), weighted by w (B,); mean over the B images."""
    x_t, v = policy.noised(batch["x0"], eps, t)
    pred = policy.predict(x_t, t, c, args.guidance if args.train_cfg else 1.0)
    err = common.denoising_error(pred, v if policy.abars is None else eps)
    return (w * err).mean(), dict(err=err.detach().mean(), err_w=(w * err).detach().mean())


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, ema: common.Ema, batch: dict[str, Tensor],
    c: common.Cond, w: Tensor, valid: Tensor, iteration: int, args: Args, ranks: Ranks,
) -> list[dict[str, float]]:  # fmt: skip
    """`epochs` passes of `updates` steps over the valid images; w and valid are of all ranks."""
    logs: list[dict[str, float]] = []
    g = torch.Generator().manual_seed(common.keyed_seed(args.seed, "shuffle", iteration))
    n, data = len(batch["x0"]), valid.nonzero().flatten()  # shares are drawn over all ranks
    first, shape = ranks.rank * n, policy.latent_shape
    optimizer.state.clear()  # official: a fresh optimizer for every data set
    for epoch in range(args.epochs if len(data) else 0):
        levels = (torch.randint(1000, (len(w),), generator=g) + 1) / 1000
        # differs: official code visits the images in one fixed order
        for whole in data[torch.randperm(len(data), generator=g)].chunk(args.updates):
            share = whole[(whole >= first) & (whole < first + n)]
            optimizer.zero_grad()
            for rows in share.split(args.micro_batch) if len(share) else ():
                part = take(c, rows - first), take(batch, rows - first)
                eps = common.keyed_noise(shape, args.seed, "eps", iteration, rows.tolist(), epoch)
                t, eps, weight = (x.to(policy.device) for x in (levels[rows], eps, w[rows]))
                value, stats = loss(policy, *part, t, eps, weight, args)
                (ranks.world * len(rows) / len(whole) * value).backward()
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
                metrics |= run.evaluate(iteration, watched, heldout)

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
            r = torch.tensor(list(weights.values())) @ everyone  # NaN where one of them failed
            w, valid = sample_weights(r, args)
            share = w[valid].sum() ** 2 / w[valid].square().sum() / len(w)
            metrics |= {"w_share": float(share)}  # 1: all images count alike

            # ---- update ----
            logs = update(policy, optimizer, ema, batch, c, w, valid, iteration, args, ranks)

            # ---- log, save ----
            diversity = float(batch["x0"].unflatten(0, (-1, args.G)).std(1).mean())
            logs.append(dict(diversity=diversity, nfe=policy.calls / len(rows)))
            metrics |= common.merge_logs([row for part in ranks.gather(logs) for row in part])
            metrics["seconds"] = time.time() - start
            run.log(iteration, metrics)
        run.finish(watched, heldout)


if __name__ == "__main__":
    main(parse_args())
