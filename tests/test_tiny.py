"""The shipped pipelines tiny/sd3, tiny/sd: size, loading by the stock class, quality bar."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import common
from rewards import load_rewards, read_splits
from tiny.world import ShapeDetector, interleave, render, sample_scene, split_prompts

TINY = Path(common.__file__).parent / "tiny"


@pytest.fixture(scope="module", params=["tiny", "tiny-sd"])
def policy(request):
    return common.load_policy(request.param)


@pytest.mark.parametrize("kind", ["sd3", "sd"])
def test_the_folder_is_small_and_in_safetensors(kind):
    files = [p for p in (TINY / kind).rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 12e6
    assert {p.suffix for p in files} <= {".json", ".safetensors"}


def test_the_stock_class_loads_sd3_in_fp32():
    from diffusers import StableDiffusion3Pipeline

    folder = TINY / "sd3"
    pipe = StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
    for part in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2):
        assert {p.dtype for p in part.parameters()} == {torch.float32}
    image = pipe("a red circle", num_inference_steps=2, guidance_scale=1.0, max_sequence_length=1)
    assert image.images[0].size == (64, 64)


def test_the_stock_class_loads_sd_in_fp32_with_the_noise_schedule_of_stable_diffusion():
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(TINY / "sd")
    for part in (pipe.unet, pipe.vae, pipe.text_encoder):
        assert {p.dtype for p in part.parameters()} == {torch.float32}
    assert isinstance(pipe.scheduler, DDIMScheduler)
    config = pipe.scheduler.config
    assert (config.beta_schedule, config.steps_offset) == ("scaled_linear", 1)
    assert not config.set_alpha_to_one
    assert not config.clip_sample
    assert config.prediction_type == "epsilon"
    abar = pipe.scheduler.alphas_cumprod  # of SD 1.x: known to every table of its noise levels
    assert abar[0].item() == pytest.approx(0.99915, abs=1e-6)
    assert abar[-1].item() == pytest.approx(0.004660, abs=1e-6)
    images = pipe(
        "a red circle", num_inference_steps=2, guidance_scale=1.0, output_type="pt"
    ).images
    assert images.shape == (1, 3, 64, 64)


def test_the_stock_pipeline_draws_what_the_policy_draws():
    """The two shifts of a latent would differ: StableDiffusionPipeline knows a scale alone."""
    from diffusers import StableDiffusionPipeline

    policy, prompt = common.load_policy("tiny-sd"), "a red circle"
    x = common.keyed_noise(policy.latent_shape, 0, "x_T", 0, [0])
    pipe = StableDiffusionPipeline.from_pretrained(TINY / "sd")
    pipe.set_progress_bar_config(disable=True)
    stock = pipe(
        prompt, num_inference_steps=5, guidance_scale=3.0, latents=x, output_type="pt"
    ).images
    ours = policy.decode(policy.sample(x, policy.encode([prompt]), 5, 3.0))
    torch.testing.assert_close(ours, stock, rtol=0, atol=2e-5)


def test_scenes_keep_their_score_through_the_autoencoder(policy):
    """At least 0.99 of 1,000 pictures are read right, and 0.92 of them after encode and decode."""
    rng, detector = random.Random(7), ShapeDetector()
    metas = interleave(split_prompts()[1], 1000, 7)
    scenes = [sample_scene(meta, rng) for meta in metas]
    truth = [sorted((s.kind, s.color) for s in scene.shapes) for scene in scenes]
    images = torch.stack([render(scene) for scene in scenes])

    def right(pictures):
        found = detector(pictures, metas)
        kept = [sorted((d.label, d.color) for d in ds if d.score > 0.9) for ds in found]
        return sum(a == b for a, b in zip(kept, truth)) / len(truth)

    config = policy.vae.config
    with torch.no_grad():
        z = torch.cat([policy.vae.encode(b / 127.5 - 1).latents for b in images.float().split(50)])
        x0 = (z - (config.shift_factor or 0)) * config.scaling_factor
        decoded = torch.cat([policy.decode(part) for part in x0.split(50)])
    assert right(images) >= 0.99
    assert right((decoded * 255).round().to(torch.uint8)) >= 0.92


def test_the_base_leaves_room_to_learn(policy):
    """512 held-out prompts, fixed noise, no guidance, 20 steps (measured: 0.36 and 0.50)."""
    rewards = load_rewards(["geneval"], {}, "cpu")
    rows = read_splits("tiny/prompts")[1]
    assert len(rows) == 512
    args = SimpleNamespace(
        micro_batch=64, eval_T=20, eval_guidance=1.0, solver="euler", heldout_reward="geneval"
    )
    metrics, _ = common.evaluate(policy, rewards, rows, args, common.Ranks("cpu"))
    assert 0.25 <= metrics["eval/strict"] <= 0.65


def test_the_base_draws_single_objects(policy):
    """Four pictures a prompt, as GenEval counts: one of 86 prompts has a standard error of 0.05."""
    (reward,) = load_rewards(["geneval"], {}, "cpu").values()
    rows = [r for r in read_splits("tiny/prompts")[1] if r["tag"] == "single_object"]
    prompts = [row["prompt"] for row in rows]
    passed = []
    with torch.no_grad():
        c = policy.encode(prompts)
        for seed in range(4):
            x = common.keyed_noise(policy.latent_shape, seed, "x_T", 0, range(len(rows)))
            images = policy.decode(policy.sample(x, c, 20, 1.0))
            passed.append(reward(images, prompts, rows).mean().item())
    assert sum(passed) / len(passed) >= 0.75, passed
