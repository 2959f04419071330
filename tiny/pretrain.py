"""Train the embedded text-to-image pipelines from nothing, on CPU, and save them for diffusers.

    python -m tiny.pretrain                    # autoencoder, then the SD3 pipeline; resumes itself
    python -m tiny.pretrain --kind sd          # the same autoencoder, then the SD pipeline
    python -m tiny.pretrain --out /tmp/sd3 --steps 2000 --cycle 2000

Two stages, each a pure function of the seed and the step; the second is checkpointed every few
minutes, the first, of five minutes, at its end:
1. `AutoencoderTiny` (f = 4, 4 latent channels) on random crops, L1 + 2 MSE, latents noised so that
   the decoder forgives small errors of the flow model.
2. `SD3Transformer2DModel` and two `CLIPTextModelWithProjection` together, by conditional flow
   matching (Lipman et al., arXiv 2210.02747; logit-normal t: Esser et al., arXiv 2403.03206),
   or `UNet2DConditionModel` and one `CLIPTextModel`, by noise prediction (Ho et al., arXiv
   2006.11239) on Stable Diffusion's betas; 10 % empty captions, EMA weights shipped. No held-out
   caption is ever seen. While the last cycle of the learning rate anneals, captions are misread
   now and then (`--caption-noise`): the base then knows more than its samples tell, which is what
   reinforcement learning is for.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import random
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from tiny.world import (
    COLORS,
    NUMBERS,
    PREFIXES,
    RELATIONS,
    SHAPES,
    interleave,
    render,
    sample_scene,
    split_prompts,
)

LATENT_CHANNELS, LATENT_SIDE, PATCH = 4, 16, 4  # 16 tokens of 16 x 16 pixels
TEXT_TOKENS = 10  # the longest caption has 8 words, and two special tokens
WIDTH, HEADS, LAYERS = 160, 5, 5
TEXT_WIDTH = 64  # of each of the two text encoders; the SD pipeline has one of twice the width
UNET_WIDTHS = (32, 64, 128)  # channels at 16 x 16, 8 x 8, 4 x 4


@dataclass
class Args:
    """Settings of the pre-training."""

    kind: Literal["sd3", "sd"] = "sd3"  # flow (SD3) or noise prediction (Stable Diffusion 1)
    out: str = ""  # where the pipeline is saved (default: tiny/KIND)
    work: str = "runs/pretrain"  # checkpoints and cached latents
    scenes: int = 48_000  # size of the data set
    caption_noise: float = 0.2  # chance of a wrong word while the last cycle anneals
    vae_steps: int = 2_500
    steps: int = 12_000  # of the model
    cycle: int = 6_000  # steps of one learning-rate cycle, whose last quarter anneals
    batch: int = 96
    lr: float = 1.5e-3
    ema: float = 0.998
    seed: int = 0
    save_every: int = 200  # steps between checkpoints


def generator(*key: int) -> torch.Generator:
    """A generator that depends on the key alone, so that a resumed run repeats the same numbers."""
    mixed = 0
    for k in key:
        mixed = (mixed * 1_000_003 + k + 1) % 2**62
    return torch.Generator().manual_seed(mixed)


def save_atomic(state: Any, path: Path) -> None:
    """torch.save through a temporary file."""
    tmp = path.with_suffix(".tmp")
    torch.save(state, tmp)
    tmp.replace(path)


def make_data(n: int, seed: int) -> tuple[torch.Tensor, list[str]]:
    """`n` pictures, uint8 (n, 3, 64, 64), and their captions, from training texts only."""
    train, _ = split_prompts()
    rng = random.Random(seed)
    metas = interleave(train, n, seed)
    images = torch.stack([render(sample_scene(m, rng)) for m in metas])
    return images, [m["prompt"] for m in metas]


def misread(caption: str, rate: float, known: Collection[str], rng: random.Random) -> str:
    """The caption with each shape, colour, number or relation another with probability `rate`.

    Captions of the web do not say exactly what their pictures show, and a model trained on such
    pairs knows more than its samples tell: it draws, now and then, what other captions ask for.
    The result is in `known`, so that no held-out text comes about.
    """
    kinds: list[tuple[str, ...]] = [
        SHAPES, tuple(s + "s" for s in SHAPES), tuple(COLORS), tuple(NUMBERS.values()),
        ("left", "right"), ("above", "below"),
    ]  # fmt: skip
    while True:
        words = caption.split(" ")
        for i, word in enumerate(words):
            others = [w for kind in kinds if word in kind for w in kind if w not in words]
            if others and rng.random() < rate:
                words[i] = rng.choice(others)
        if " ".join(words) in known:
            return " ".join(words)


# ---- Autoencoder --------------------------------------------------------------------------------


def make_vae(shift: float = 0.0, scale: float = 1.0) -> Any:
    """An untrained f = 4 autoencoder; latents go to the flow model as (z - shift) * scale."""
    from diffusers import AutoencoderTiny

    width = (24, 24, 24)
    return AutoencoderTiny(
        encoder_block_out_channels=width,
        decoder_block_out_channels=width,
        latent_channels=LATENT_CHANNELS,
        num_encoder_blocks=(1, 1, 2),
        num_decoder_blocks=(2, 1, 1),
        scaling_factor=scale,
        shift_factor=shift,
    )


def train_vae(args: Args, images: torch.Tensor, work: Path) -> Any:
    """Train or load the autoencoder; its config carries the latents' shift and scale."""
    done = work / "vae.pt"
    if done.exists():
        saved = torch.load(done, weights_only=True)
        vae = make_vae(saved["shift"], saved["scale"])
        vae.load_state_dict(saved["model"])
        return vae.eval()
    torch.manual_seed(args.seed)
    vae = make_vae().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=3e-3, betas=(0.9, 0.99))
    ema = copy.deepcopy(vae)
    start = time.time()
    for step in range(args.vae_steps):
        set_lr(optimizer, 3e-3 * schedule(step, args.vae_steps, hold=0.3))
        g = generator(args.seed, 1, step)
        rows = torch.randint(len(images), (16,), generator=g)
        y, x = (8 * torch.randint(4, (2,), generator=g)).tolist()
        batch = images[rows, :, y : y + 40, x : x + 40].float() / 127.5 - 1
        z = vae.encoder(batch)
        noisy = z + 0.05 * torch.randn(z.shape, generator=g)
        out = vae.decoder(noisy)
        mean, std = z.mean((0, 2, 3)), z.std((0, 2, 3))
        error = (out - batch).abs() + 2 * (out - batch).square()
        loss = (error * foreground(batch)).mean()
        loss = loss + 0.01 * (mean.square().mean() + (std - 1).square().mean())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        update_ema(ema, vae, min(args.ema, step / (step + 10)))
        if step % 250 == 0 or step == args.vae_steps - 1:
            print(f"vae {step} loss {loss.item():.4f} {time.time() - start:.0f}s", flush=True)
    ema = ema.eval()
    z = encode_all(ema, images[:4096])
    shift, scale = z.mean().item(), 1 / z.std().item()
    save_atomic({"model": ema.state_dict(), "shift": shift, "scale": scale}, done)
    return train_vae(args, images, work)


def foreground(images: torch.Tensor) -> torch.Tensor:
    """Weights (B, 1, H, W): 5 on and around shapes, which cover a tenth of a picture, else 1."""
    saturated = (images.amax(1, keepdim=True) - images.amin(1, keepdim=True) > 0.2).float()
    return 1 + 4 * F.max_pool2d(saturated, 5, stride=1, padding=2)


@torch.no_grad()
def encode_all(vae: Any, images: torch.Tensor) -> torch.Tensor:
    """Raw latents (n, 4, 16, 16) of uint8 pictures; small channels_last batches are fastest."""
    vae = vae.to(memory_format=torch.channels_last)
    return torch.cat([vae.encoder(b.float() / 127.5 - 1) for b in images.split(16)]).contiguous()


# ---- Text ---------------------------------------------------------------------------------------


def make_tokenizer(folder: Path) -> Any:
    """A CLIP tokenizer in which every word of the captions is one token.

    Byte-pair merges are learned on the words alone until none is split; any other text falls back
    to bytes, so that every prompt can be encoded.
    """
    from transformers import CLIPTokenizer

    words = {"a", "and", *SHAPES, *(s + "s" for s in SHAPES), *COLORS, *NUMBERS.values()}
    words |= {w for r in RELATIONS for w in r.split()} | {p.strip() for p in PREFIXES if p}
    split = {w: [*w[:-1], w[-1] + "</w>"] for w in sorted(words)}
    merges = []
    while any(len(parts) > 1 for parts in split.values()):
        counts: dict[tuple[str, str], int] = {}
        for parts in split.values():
            for pair in zip(parts, parts[1:]):
                counts[pair] = counts.get(pair, 0) + 1
        best = max(counts, key=lambda p: (counts[p], p))
        merges.append(best)
        for word, parts in split.items():
            split[word] = _merge(parts, best)
    symbols = _byte_symbols()
    vocab = [*symbols, *(s + "</w>" for s in symbols), *("".join(m) for m in merges)]
    vocab += ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(vocab)}))
    lines = ["#version: 0.2", *(" ".join(m) for m in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n")
    tokenizer = CLIPTokenizer.from_pretrained(folder, model_max_length=TEXT_TOKENS)
    for word in words:
        assert len(tokenizer(word).input_ids) == 3, word
    return tokenizer


def _merge(parts: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for part in parts:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return out


def _byte_symbols() -> list[str]:
    """The 256 printable stand-ins for bytes of GPT-2's byte-level BPE, which CLIP shares."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(len(rest))]


# ---- Flow model ---------------------------------------------------------------------------------


def text_config(vocab: int, width: int, layers: int) -> Any:
    """A CLIP text encoder for the captions."""
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=TEXT_TOKENS,
        hidden_act="gelu",
        bos_token_id=vocab - 2,
        eos_token_id=vocab - 1,
        pad_token_id=vocab - 1,
    )


def make_models(vocab: int) -> torch.nn.ModuleDict:
    """Transformer and two text encoders, untrained."""
    from diffusers import SD3Transformer2DModel
    from transformers import CLIPTextModelWithProjection

    transformer: Any = SD3Transformer2DModel(
        sample_size=LATENT_SIDE,
        patch_size=PATCH,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=LAYERS,
        attention_head_dim=WIDTH // HEADS,
        num_attention_heads=HEADS,
        joint_attention_dim=2 * TEXT_WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=LATENT_SIDE // PATCH,
        qk_norm="rms_norm",
    )
    text = text_config(vocab, TEXT_WIDTH, 3)
    return torch.nn.ModuleDict(
        dict(
            transformer=transformer,
            text_encoder=CLIPTextModelWithProjection(text),
            text_encoder_2=CLIPTextModelWithProjection(text),
        )
    )


def encode_text(models: torch.nn.ModuleDict, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What StableDiffusion3Pipeline.encode_prompt returns for these token ids, T5 absent.

    Without a T5 the pipeline appends `max_sequence_length` zero tokens; here that setting is 1.
    """
    hidden, pooled = [], []
    for name in ("text_encoder", "text_encoder_2"):
        out = models[name](ids, output_hidden_states=True)
        hidden.append(out.hidden_states[-2])
        pooled.append(out.text_embeds)
    tokens = F.pad(torch.cat(hidden, -1), (0, 0, 0, 1))  # (B, 10 + 1, 128)
    return tokens, torch.cat(pooled, -1)


def make_sd_models(vocab: int) -> torch.nn.ModuleDict:
    """UNet and text encoder of the SD pipeline, untrained."""
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextModel

    unet: Any = UNet2DConditionModel(
        sample_size=LATENT_SIDE,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=UNET_WIDTHS,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=2 * TEXT_WIDTH,
        attention_head_dim=4,
        norm_num_groups=16,
    )
    text = CLIPTextModel(text_config(vocab, 2 * TEXT_WIDTH, 2))
    models = torch.nn.ModuleDict(dict(unet=unet, text_encoder=text))
    return models.to(memory_format=torch.channels_last)  # convolutions are faster so on a CPU


@functools.cache
def make_ddim() -> Any:
    """Stable Diffusion 1's own noise schedule: scaled-linear betas, offset 1, ends at abar[0]."""
    from diffusers import DDIMScheduler

    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def flow_loss(
    models: torch.nn.ModuleDict, x0: torch.Tensor, ids: torch.Tensor, g: torch.Generator
) -> torch.Tensor:
    """Mean squared error of the velocity at one logit-normal t a picture."""
    t = torch.sigmoid(torch.randn(len(x0), generator=g))
    eps = torch.randn(x0.shape, generator=g)
    w = t[:, None, None, None]
    tokens, pooled = encode_text(models, ids)
    x_t = (1 - w) * x0 + w * eps
    v = models["transformer"](x_t, tokens, pooled, 1000 * t, return_dict=False)[0]
    return F.mse_loss(v, eps - x0)


def eps_loss(
    models: torch.nn.ModuleDict, x0: torch.Tensor, ids: torch.Tensor, g: torch.Generator
) -> torch.Tensor:
    """Squared error of the noise at one uniform timestep a picture, weighted min(1 / abar, 10).

    1 / abar makes it the error of v (Salimans and Ho, arXiv 2202.00512), which weighs the noisy
    timesteps that decide the composition; the bound keeps the noisiest ones from dominating.
    """
    alphas_cumprod = make_ddim().alphas_cumprod
    k = torch.randint(len(alphas_cumprod), (len(x0),), generator=g)
    eps = torch.randn(x0.shape, generator=g)
    abar = alphas_cumprod[k][:, None, None, None]
    tokens = models["text_encoder"](ids)[0]
    x_t = abar.sqrt() * x0 + (1 - abar).sqrt() * eps
    error = (models["unet"](x_t, k, tokens, return_dict=False)[0] - eps).square()
    return ((1 / abar).clamp(max=10) * error).mean()


def train_model(
    args: Args, z: torch.Tensor, captions: list[str], work: Path
) -> torch.nn.ModuleDict:
    """Train or resume the model on scaled latents `z` (n, 4, 16, 16); returns EMA weights."""
    tokenizer = make_tokenizer(work / "tokenizer")
    torch.manual_seed(args.seed)
    make, loss_of, name, _ = KINDS[args.kind]
    models = make(len(tokenizer))
    ema = copy.deepcopy(models)
    optimizer = torch.optim.AdamW(models.parameters(), lr=args.lr, betas=(0.9, 0.99))
    first, file = 0, work / name
    if file.exists():
        saved = torch.load(file, weights_only=True)
        models.load_state_dict(saved["models"])
        ema.load_state_dict(saved["ema"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    known, rng = set(captions), random.Random(args.seed)
    misread_captions = [misread(c, args.caption_noise, known, rng) for c in captions]
    texts = ["", *sorted(known)]
    ids = tokenizer(texts, padding="max_length", return_tensors="pt").input_ids
    index = {t: i for i, t in enumerate(texts)}
    exact, wrong = (torch.tensor([index[c] for c in x]) for x in (captions, misread_captions))
    start, total = time.time(), 0.0
    for step in range(first, args.steps):
        if step % args.cycle == 0:  # a cycle starts from the average of the last, as if new
            models.load_state_dict(ema.state_dict())
            optimizer = torch.optim.AdamW(models.parameters(), lr=args.lr, betas=(0.9, 0.99))
        set_lr(optimizer, args.lr * schedule(step % args.cycle, args.cycle, hold=0.75))
        rows_of = exact if step < args.steps - args.cycle // 4 else wrong
        g = generator(args.seed, 2, step)
        rows = torch.randint(len(z), (args.batch,), generator=g)
        keep = torch.rand(args.batch, generator=g) >= 0.1
        loss = loss_of(models, z[rows], ids[rows_of[rows] * keep], g)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(models.parameters(), 1.0)
        optimizer.step()
        update_ema(ema, models, min(args.ema, step / (step + 10)))
        total += loss.item()
        if (step + 1) % 100 == 0:
            speed = (time.time() - start) / (step + 1 - first)
            print(f"{args.kind} {step + 1} loss {total / 100:.4f} {speed:.2f} s/step", flush=True)
            total = 0.0
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            state = dict(models=models.state_dict(), ema=ema.state_dict(), step=step + 1)
            save_atomic({**state, "optimizer": optimizer.state_dict()}, file)
    return ema.eval()


def schedule(step: int, steps: int, hold: float) -> float:
    """Warm-up over 200 steps, constant, then a cosine to 2 % after the share `hold`."""
    warm = min(1.0, (step + 1) / 200)
    after = max(0.0, step / steps - hold) / (1 - hold)
    return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * after)))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set one learning rate for all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def update_ema(ema: torch.nn.Module, model: torch.nn.Module, decay: float) -> None:
    """ema <- decay * ema + (1 - decay) * model, in place."""
    for e, p in zip(ema.parameters(), model.parameters()):
        e.lerp_(p, 1 - decay)


def export(models: torch.nn.ModuleDict, vae: Any, work: Path, out: Path) -> None:
    """Save a `StableDiffusion3Pipeline` folder, the large parts in fp16.

    diffusers loads its models in fp32 by default and transformers in the stored dtype, so the two
    text encoders are stored in fp32: a plain `from_pretrained(folder)` is all fp32.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    tokenizer = make_tokenizer(work / "tokenizer")
    pipe: Any = StableDiffusion3Pipeline(
        transformer=copy.deepcopy(models["transformer"]).half(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=copy.deepcopy(vae).half(),
        text_encoder=models["text_encoder"],
        tokenizer=tokenizer,
        text_encoder_2=models["text_encoder_2"],
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipe.save_pretrained(out, safe_serialization=True)


def export_sd(models: torch.nn.ModuleDict, vae: Any, work: Path, out: Path) -> None:
    """Save a `StableDiffusionPipeline` folder, the large parts in fp16."""
    from diffusers import StableDiffusionPipeline

    pipe: Any = StableDiffusionPipeline(
        vae=copy.deepcopy(vae).half(),
        text_encoder=models["text_encoder"],
        tokenizer=make_tokenizer(work / "tokenizer"),
        unet=copy.deepcopy(models["unet"]).half(),
        scheduler=make_ddim(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.save_pretrained(out, safe_serialization=True)


# kind -> untrained models, loss, checkpoint, export
KINDS: dict[str, tuple[Any, Any, str, Any]] = {
    "sd3": (make_models, flow_loss, "flow.pt", export),
    "sd": (make_sd_models, eps_loss, "eps.pt", export_sd),
}


def main(args: Args) -> None:
    """Both stages, then the export."""
    if args.steps % args.cycle:
        raise SystemExit(f"--cycle: {args.steps} steps are no whole number of {args.cycle}")
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    images, captions = make_data(args.scenes, args.seed)
    vae = train_vae(args, images, work)
    latents = work / "latents.pt"
    if not latents.exists():
        raw = encode_all(vae, images)
        save_atomic((raw - vae.config.shift_factor) * vae.config.scaling_factor, latents)
    del images
    z = torch.load(latents, weights_only=True)
    if args.kind == "sd":  # the stock StableDiffusionPipeline scales latents and shifts none
        z = z + vae.config.shift_factor * vae.config.scaling_factor
        vae.register_to_config(shift_factor=0.0)
    models = train_model(args, z, captions, work)
    out = Path(args.out or f"tiny/{args.kind}")
    KINDS[args.kind][-1](models, vae, work, out)
    print(f"saved {out}")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
