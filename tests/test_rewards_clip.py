"""The rewards with a network: against official numbers, through small random models."""

import copy
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_rewards import GOLDEN, ROOT, VECTORS, inputs, noise
from torch.nn import functional as TF

import rewards
from rewards import (
    COLORS,
    OBJECTS,
    AffineHead,
    Detection,
    RewardUnavailable,
    checkpoint,
    clean_prompt,
    clip_pixels,
    from_imagereward,
    from_open_clip,
    geneval_score,
    hps_pixels,
    instances,
    make_reward,
    open_clip_config,
    to_uint8,
)

LEGACY, HPS = VECTORS["legacy"], VECTORS["hps"]
PROMPTS = inputs.PROMPTS
VARIABLES = [name for name in os.environ if name.startswith("REWARD_")]


@pytest.fixture(autouse=True)
def _no_override(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name)


def picture(name: str, size: int) -> torch.Tensor:
    return torch.from_numpy(inputs.test_image(name, size)).permute(2, 0, 1)


PICTURES = [picture("sine", 64), picture("noise", 48), picture("gradient", 28)]


def pillow(image: torch.Tensor, side: int) -> torch.Tensor:
    """The official path of an image: Pillow's bicubic to the shortest edge, centre crop; uint8."""
    pil = Image.fromarray(image.permute(1, 2, 0).numpy())
    scale = side / min(pil.size)
    pil = pil.resize([int(n * scale) for n in pil.size], Image.Resampling.BICUBIC)
    x, y = (pil.width - side) // 2, (pil.height - side) // 2
    return torch.from_numpy(np.array(pil.crop((x, y, x + side, y + side)))).permute(2, 0, 1)


# ---- small checkpoints ----


def byte_names() -> list[str]:
    """CLIP's names of the 256 bytes, in its order."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [*map(chr, shown), *(chr(256 + i) for i in range(256 - len(shown)))]


def save_bpe(folder: Path) -> None:
    """The part of CLIP's vocabulary that the texts of the vectors need, with its real ids."""
    merges = json.loads((GOLDEN / "clip_bpe.json").read_text())
    folder.mkdir()
    vocab = {name: i for i, name in enumerate([*byte_names(), *(f"{n}</w>" for n in byte_names())])}
    vocab |= {a + b: i for i, a, b in merges}
    vocab |= {"<|startoftext|>": 49406, "<|endoftext|>": 49407}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    lines = [f"{a} {b}\n" for _, a, b in merges]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(lines))


def save_bert(folder: Path) -> None:
    """A WordPiece vocabulary of 200: special tokens and letters."""
    folder.mkdir()
    letters = [chr(97 + i) for i in range(26)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    words += [f"[unused{i}]" for i in range(200 - len(words))]
    (folder / "vocab.txt").write_text("\n".join(words))


def state(shapes: dict) -> dict[str, torch.Tensor]:
    return {k: v.reshape(shapes[k]) for k, v in inputs.fill_state(shapes).items()}


DOG = OBJECTS.index("dog")


def save_detector(folder: Path) -> None:
    """A tiny Mask2Former whose every query may be a dog, with random masks."""
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    swin = SwinConfig(
        image_size=64, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=swin, feature_size=32, mask_feature_size=32, hidden_dim=32,
        encoder_feedforward_dim=32, dim_feedforward=32, encoder_layers=1, decoder_layers=2,
        num_attention_heads=2, num_queries=6, id2label=dict(enumerate(OBJECTS)),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Mask2FormerForUniversalSegmentation(config)
    with torch.no_grad():
        model.class_predictor.bias[DOG] += 4.87  # scores about 0.3, the threshold
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Folder of all small checkpoints."""
    root = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "TOK_DIR", str(root / "bytes"))
        inputs.save_tiny(root / "gelu", "gelu")
        inputs.save_tiny(root / "quick", "quick_gelu", 768)
    torch.save(state(LEGACY["aesthetic_head_shapes"]), root / "head.pth")
    (root / "hps").mkdir()
    torch.save({"state_dict": state(HPS["shapes"])}, root / "hps" / "HPS_v2.1_compressed.pt")
    torch.save(state(LEGACY["imagereward_shapes"]), root / "ImageReward.pt")
    save_bpe(root / "bpe")
    save_bert(root / "bert")
    save_detector(root / "detector")
    return root


@pytest.fixture(autouse=True)
def _small_heads(monkeypatch):
    monkeypatch.setattr(rewards, "HPS_HEADS", 2)
    monkeypatch.setattr(rewards, "IMAGEREWARD_HEADS", (2, 12))
    monkeypatch.setattr(rewards, "DETECTOR_SIDES", (64, 107))


MAKERS = {
    "clipscore": lambda f, **o: make_reward("clipscore", path=f / "gelu", **o),
    "pickscore": lambda f, **o: make_reward("pickscore", path=f / "gelu", **o),
    "aesthetic": lambda f, **o: make_reward(
        "aesthetic", path=f / "quick", head=f / "head.pth", **o
    ),
    "hpsv2": lambda f, **o: make_reward("hpsv2", path=f / "hps", tokenizer=f / "bpe", **o),
    "imagereward": lambda f, **o: make_reward(
        "imagereward", path=f / "ImageReward.pt", tokenizer=f / "bert", **o
    ),
    "geneval": lambda f, **o: make_reward(
        "geneval", detector="mask2former", path=f / "detector", clip_path=f / "gelu", **o
    ),
    "geneval_soft": lambda f, **o: make_reward(
        "geneval_soft", detector="mask2former", path=f / "detector", clip_path=f / "gelu", **o
    ),
}
each_reward = pytest.mark.parametrize("name", MAKERS)


@pytest.fixture(scope="module")
def loaded(files):
    """loaded(name): the reward on the small checkpoints, loaded once; a copy to set up."""
    cache = {}

    def get(name: str) -> rewards.Reward:
        if name not in cache:
            cache[name] = MAKERS[name](files)
        return copy.copy(cache[name])

    return get


def one_by_one(reward, images=PICTURES, prompts=PROMPTS) -> list[float]:
    return [reward(image[None], [text]).item() for image, text in zip(images, prompts)]


def close(values, wanted, tolerance: float):
    return values == pytest.approx(wanted, abs=tolerance, rel=0)


# ---- official numbers ----


def test_clipscore_and_pickscore_vectors(loaded, files):
    cosine, published = one_by_one(loaded("clipscore")), one_by_one(loaded("pickscore"))
    pick = [score / 26 for score in published]
    assert close(cosine, LEGACY["cosine_pairs_pil"], 2e-3)
    assert close(pick, LEGACY["pickscore_div26"], 2e-3)
    assert close(pick[2], LEGACY["pickscore_div26"][2], 1e-5)  # 28 pixels: no resize
    assert close(cosine[2], LEGACY["cosine_pairs_pil"][2], 1e-5)
    exact = [pillow(image, 28) for image in PICTURES]
    assert close(one_by_one(loaded("clipscore"), exact), LEGACY["cosine_pairs_pil"], 1e-5)
    flow_grpo = make_reward("pickscore", path=files / "gelu", scale=26)
    assert close(one_by_one(flow_grpo, exact), LEGACY["pickscore_div26"], 1e-5)
    published = one_by_one(loaded("pickscore"), exact)
    assert close([(s - 18) / 8 for s in published], LEGACY["pickscore_mixgrpo"], 1e-5)


def test_clipscore_vectors_of_diffusion_nft_and_dgpo(loaded, files):
    """They resize floats by bilinear interpolation, so the picture is prepared as theirs here."""
    from torchvision.transforms.v2 import functional as F

    clip = rewards._load_clip("clipscore", files / "gelu", "cpu", torch.float32)
    values = []
    for name, text in zip(("sine", "noise", "gradient"), PROMPTS):
        floats = F.resize(picture(name, 64)[None] / 255, [28], antialias=True)
        pixels = F.normalize(floats, rewards.CLIP_MEAN, rewards.CLIP_STD)
        values.append((clip.embed_pixels(pixels) * clip.embed_texts([text])).sum().item())
    assert close(values, LEGACY["clipscore_nft_div100"], 1e-5)
    assert close([v / 0.3 for v in values], LEGACY["clipscore_dgpo_div30"], 1e-5)
    thirty = make_reward("clipscore", path=files / "gelu", scale=0.3)
    assert close([v * 0.3 for v in one_by_one(thirty)], one_by_one(loaded("clipscore")), 1e-6)


def test_token_ids(files):
    tokenizer = rewards._load_tokenizer("clipscore", "CLIPTokenizer", files / "gelu")
    for text, ids in zip(PROMPTS, LEGACY["token_ids"]):
        assert tokenizer(text, truncation=True, max_length=77)["input_ids"] == ids


def test_aesthetic_vectors(loaded):
    images = [picture(name, 64) for name in ("sine", "noise", "gradient")]
    exact = [pillow(image, 28) for image in images]
    assert close(one_by_one(loaded("aesthetic"), exact), LEGACY["aesthetic_ddpo"], 1e-5)
    assert close(one_by_one(loaded("aesthetic"), images), LEGACY["aesthetic_ddpo"], 2e-3)


def test_imagereward_vectors(files):
    given = LEGACY["imagereward"]
    mask = torch.ones(3, 35, dtype=torch.long)
    mask[0, 12:] = mask[1, 20:] = 0
    ids = (3 + (torch.arange(105).reshape(3, 35) * 37) % 190) * mask

    def tokens(texts, **options):
        rows = [int(text) for text in texts]
        return {"input_ids": ids[rows], "attention_mask": mask[rows]}

    model = rewards.ImageRewardModel(files / "ImageReward.pt", tokens, "cpu", torch.float32)
    exact = torch.stack([pillow(image, 224) for image in PICTURES])
    assert close(model(exact, ["0", "1", "2"]).tolist(), given["scores"], 1e-5)
    resized = [model(image[None], [str(i)]).item() for i, image in enumerate(PICTURES)]
    assert close(resized, given["scores"], 1e-3)


def test_hps_vectors(loaded):
    images = [*PICTURES, PICTURES[0][:, :40]]
    values = one_by_one(loaded("hpsv2"), images, HPS["texts"])
    assert close(values, HPS["scores"], 1e-5)
    assert close([100 * v for v in values], HPS["benchmark_x100"], 1e-3)


def test_hps_token_ids(files, monkeypatch):
    tokenizer = rewards._load_tokenizer("hpsv2", "CLIPTokenizer", files / "bpe")
    for text, ids in zip(HPS["texts"], HPS["ids"]):
        got = tokenizer(clean_prompt(text), truncation=True, max_length=77)["input_ids"]
        assert got == ids
    assert tokenizer(HPS["texts"][3])["input_ids"] != HPS["ids"][3]  # uncleaned


def test_names_and_templates_of_geneval():
    given = VECTORS["geneval"]
    assert given["object_names"] == OBJECTS
    assert list(given["palette_stub"]) == COLORS
    templates = [t.replace("{o}", "CLASS") for t in rewards.COLOR_TEMPLATES]
    assert given["colour_templates"] == templates


# ---- pictures and prompts ----


@pytest.mark.parametrize("shape", [(64, 64), (40, 64), (64, 41), (28, 28), (20, 20)])
def test_clip_pixels_equal_those_of_transformers_and_pillow(shape):
    from transformers import CLIPImageProcessor

    image = noise(1, 64)[0][:, : shape[0], : shape[1]]
    processor = CLIPImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    theirs = processor(image, return_tensors="pt")["pixel_values"]
    level = 1 / 255 / min(rewards.CLIP_STD)
    assert (clip_pixels(image[None], 28) - theirs).abs().max() < 1.01 * level
    if shape[0] == shape[1]:
        assert (clip_pixels(image[None], 28) - clip_pixels(pillow(image, 28)[None], 28)).abs().max() \
            < 1.01 * level  # fmt: skip


def test_hps_pads_the_short_side_with_black_and_keeps_the_long_one():
    white = torch.full((1, 3, 20, 56), 255, dtype=torch.uint8)
    pixels = hps_pixels(white, 28)
    mean, std = (torch.tensor(v).view(3, 1) for v in (rewards.CLIP_MEAN, rewards.CLIP_STD))
    rows = (pixels[0].mean(2) * std + mean).round(decimals=4)  # (3, 28)
    assert rows.unique(dim=0).tolist() == [[0.0] * 9 + [1.0] * 10 + [0.0] * 9]
    assert torch.allclose(hps_pixels(white.mT, 28), pixels.mT, atol=1e-5)


def test_hps_without_antialiasing(loaded, files):
    old = make_reward("hpsv2", path=files / "hps", tokenizer=files / "bpe", antialias=False)
    new = loaded("hpsv2")
    assert abs(one_by_one(old)[0] - one_by_one(new)[0]) > 5e-4
    assert one_by_one(old)[2] == one_by_one(new)[2]  # 28 pixels: no resize
    sampled = TF.interpolate(PICTURES[0][None] / 255, (28, 28), mode="bicubic")
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (rewards.CLIP_MEAN, rewards.CLIP_STD))
    pixels = hps_pixels(PICTURES[0][None], 28, antialias=False)
    assert torch.allclose(pixels, (sampled - mean) / std, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("it\u2019s \u201cso\u201d \u2018fine\u2019", "it's \"so\" 'fine'"),
        ("a &amp; b &amp;lt; c", "a & b < c"),
        ("&rsquo;t &ldquo;", "'t \""),
        ("\ufb01ne \uff37\uff29\uff24\uff25\u3000sign\uff01", "fine WIDE sign!"),
        ("cafe\u0301 ½", "café ½"),
    ],
)
def test_prompts_are_cleaned_for_hps_without_ftfy(text, clean, monkeypatch):
    monkeypatch.setitem(sys.modules, "ftfy", None)
    assert clean_prompt(text) == clean


def test_prompts_are_cleaned_for_hps_by_ftfy_where_it_is(monkeypatch):
    class Ftfy:
        fix_text = staticmethod(lambda text: text.replace("ö", "&amp;lt;"))

    monkeypatch.setitem(sys.modules, "ftfy", Ftfy)
    assert clean_prompt("ö\u2019") == "<\u2019"


# ---- key maps ----


def open_clip_shapes(text=(24, 1024), vision=(32, 1280), dim=1024) -> dict[str, tuple[int, ...]]:
    """Of open_clip's ViT-H-14, written out from its definition."""
    out = {"logit_scale": (), "attn_mask": (77, 77), "positional_embedding": (77, text[1])}
    out |= {"token_embedding.weight": (49408, text[1]), "text_projection": (text[1], dim)}
    out |= {"visual.class_embedding": (vision[1],), "visual.proj": (vision[1], dim)}
    out |= {"visual.positional_embedding": (257, vision[1])}
    out |= {"visual.conv1.weight": (vision[1], 3, 14, 14)}
    norms = [("ln_final", text[1]), ("visual.ln_pre", vision[1]), ("visual.ln_post", vision[1])]
    for prefix, (layers, w) in (("", text), ("visual.", vision)):
        for i in range(layers):
            block = f"{prefix}transformer.resblocks.{i}"
            norms += [(f"{block}.ln_1", w), (f"{block}.ln_2", w)]
            out |= {
                f"{block}.attn.in_proj_weight": (3 * w, w),
                f"{block}.attn.in_proj_bias": (3 * w,),
            }
            for part, rows, columns in (
                ("attn.out_proj", w, w), ("mlp.c_fc", 4 * w, w), ("mlp.c_proj", w, 4 * w),
            ):  # fmt: skip
                out |= {f"{block}.{part}.weight": (rows, columns), f"{block}.{part}.bias": (rows,)}
    return out | {f"{n}.{p}": (w,) for n, w in norms for p in ("weight", "bias")}


def on_meta(shapes) -> dict[str, torch.Tensor]:
    return {key: torch.empty(tuple(shape), device="meta") for key, shape in shapes.items()}


def shapes_of(tensors) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in tensors.items()}


def test_the_map_of_hps_is_a_bijection_at_full_size():
    from transformers import CLIPConfig, CLIPModel

    given = on_meta(open_clip_shapes())
    mapped = from_open_clip(given)
    with torch.device("meta"):
        model = CLIPModel(CLIPConfig(**open_clip_config(given, 16)))
    assert shapes_of(mapped) == shapes_of(model.state_dict())
    assert len(mapped) == 910
    assert sum(value.numel() for value in mapped.values()) == 986_109_441
    assert model.config.vision_config.image_size == 224


def test_no_weight_of_hps_is_lost_or_used_twice():
    given = state(HPS["shapes"])
    mapped = from_open_clip({**given, "attn_mask": torch.zeros(77, 77)})
    before = torch.cat([v.flatten() for v in given.values()]).sort().values
    after = torch.cat([v.flatten() for v in mapped.values()]).sort().values
    assert torch.equal(before, after)


def test_the_map_of_imagereward_is_a_bijection_at_full_size():
    from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

    sizes = {32: 1024, 96: 3072, 200: 30524, 64: 512}  # the small model's -> the real one's
    layers = {"visual_encoder.blocks": 24, "text_encoder.encoder.layer": 12}
    shapes = {}
    for key, shape in LEGACY["imagereward_shapes"].items():
        full = [sizes.get(n, n) for n in shape]
        if "visual_encoder.blocks" in key and ("mlp" in key or "qkv" in key):
            wide = {"mlp": 4096, "qkv": 3072}["mlp" if "mlp" in key else "qkv"]
            full = [n if n == 32 else wide for n in shape]
            full = [1024 if n == 32 else n for n in full]
        for prefix, count in layers.items():
            if f"{prefix}.0." in key:
                for i in range(count):
                    shapes[key.replace(f"{prefix}.0.", f"{prefix}.{i}.")] = full
                break
        else:
            if not any(f"{prefix}." in key for prefix in layers):
                shapes[key] = full
    vision, text = from_imagereward(on_meta(shapes))
    a, b = rewards.imagereward_configs(vision, text, (16, 12))
    with torch.device("meta"):
        models = BlipVisionModel(BlipVisionConfig(**a)), BlipTextModel(BlipTextConfig(**b), False)
    for mapped, model in zip((vision, text), models):
        assert shapes_of(mapped) == shapes_of(model.state_dict())
    assert (a["layer_norm_eps"], a["image_size"], a["patch_size"]) == (1e-6, 224, 16)
    assert (b["max_position_embeddings"], b["vocab_size"]) == (512, 30524)


def test_a_folded_head_equals_its_layers():
    layers = torch.nn.Sequential(
        torch.nn.Linear(12, 8), torch.nn.Dropout(), torch.nn.Linear(8, 5), torch.nn.Dropout(),
        torch.nn.Linear(5, 1),
    ).double().eval()  # fmt: skip
    weights = {f"layers.{key}": value for key, value in layers.state_dict().items()}
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(0))
    head = AffineHead({**weights, "other.0.weight": torch.ones(1)}, "layers.", "cpu")
    assert torch.allclose(head(x).double(), layers(x.double())[:, 0], atol=1e-6)
    assert head(x.bfloat16()).dtype == torch.float32


# ---- the contract ----

B = 5
TEXTS = ["a cat", "a dog", "x" * 120, "a cat", ""]
METAS = [{"tag": "single_object", "include": [{"class": "dog", "count": 1 + i}]} for i in range(B)]


@each_reward
def test_the_batch_changes_nothing(name, loaded):
    reward = loaded(name)
    images = torch.cat([noise(B - 1, 40), picture("sine", 40)[None]])
    whole = reward(images, TEXTS, METAS)
    assert whole.isfinite().all()
    assert name == "geneval" or len(whole.unique()) > 2
    for batch_size in (1, 2):
        reward.batch_size = batch_size
        assert torch.allclose(reward(images, TEXTS, METAS), whole, atol=2e-5)
    order = [3, 0, 4, 1, 2]
    permuted = reward(images[order], [TEXTS[i] for i in order], [METAS[i] for i in order])
    assert torch.allclose(permuted, whole[order], atol=2e-5)


@each_reward
def test_uint8_and_floats_agree_without_a_gradient(name, loaded):
    reward, levels = loaded(name), noise(2, 40)
    wanted = reward(levels, TEXTS[:2], METAS[:2])
    floats = (levels.float() / 255).requires_grad_()
    values = reward(floats, TEXTS[:2], METAS[:2])
    assert torch.equal(values, wanted)
    assert values.dtype == torch.float32
    assert not values.requires_grad
    half = levels.bfloat16() / 255
    assert torch.equal(
        reward(half, TEXTS[:2], METAS[:2]), reward(to_uint8(half), TEXTS[:2], METAS[:2])
    )


@each_reward
def test_a_failed_sample_is_nan_alone(name, loaded):
    reward, images = loaded(name), noise(3, 40) / 255
    wanted = reward(images, TEXTS[:3], METAS[:3])
    assert wanted.isfinite().all()
    inner = reward._score

    def broken(images, prompts, metas):
        if "a dog" in prompts:
            raise OSError("injected")
        return inner(images, prompts, metas)

    reward._score = broken
    values = reward(images, TEXTS[:3], METAS[:3])
    assert values.isnan().tolist() == [False, True, False]
    assert torch.allclose(values[[0, 2]], wanted[[0, 2]], atol=2e-5)
    images[2, 0, 0, 0] = math.nan
    assert reward(images, TEXTS[:3], METAS[:3]).isnan().tolist() == [False, True, True]


@each_reward
def test_kind_and_an_empty_batch(name, loaded):
    reward = loaded(name)
    assert (reward.name, reward.kind) == (name, "gpu")
    assert reward(torch.zeros(0, 3, 8, 8), [], []).shape == (0,)


def test_the_image_decides_aesthetic_and_the_prompt_the_others(loaded):
    for name in ("aesthetic", "clipscore", "pickscore", "hpsv2", "imagereward"):
        reward, image = loaded(name), picture("sine", 40)[None]
        a, b = reward(image, ["a cat"]), reward(image, ["not"])
        assert torch.equal(a, b) == (name == "aesthetic")
        assert not torch.equal(a, reward(255 - image, ["a cat"]))


def test_only_the_first_35_tokens_of_a_prompt_reach_imagereward(loaded):
    reward, image = loaded("imagereward"), picture("sine", 40)[None]
    a, b, c = ("a" * 33, "a" * 33 + "b" * 9, "a" * 32 + "b")  # [CLS] and [SEP] count
    values = [reward(image, [text]).item() for text in (a, b, c)]
    assert values[0] == values[1] != values[2]


def test_a_prompt_that_occurs_often_is_encoded_once(files):
    clip = rewards._load_clip("clipscore", files / "gelu", "cpu", torch.float32)
    seen, inner = [], clip.embed_texts
    clip.embed_texts = lambda texts: seen.append(list(texts)) or inner(texts)
    clip.cosine(noise(5, 28), ["b", "a", "b", "b", "a"])
    assert seen == [["b", "a"]]


def test_towers_may_run_in_half_precision_and_nothing_else_does(files, loaded):
    clip = rewards._load_clip("clipscore", files / "gelu", "cpu", torch.bfloat16)
    assert {p.dtype for p in clip.model.parameters()} == {torch.bfloat16}
    assert clip.logit_scale == pytest.approx(100, abs=1e-4)
    for unit in (clip.embed_images(noise(2, 28)), clip.embed_texts(["a", "b"])):
        assert unit.dtype == torch.float32
        assert torch.allclose(unit.norm(dim=1), torch.ones(2), atol=1e-6)
    for name in ("clipscore", "pickscore", "aesthetic", "hpsv2", "imagereward"):
        half = MAKERS[name](files, dtype=torch.bfloat16)
        texts, images = ["a cat", "not"], noise(2, 40)
        full = loaded(name)(images, texts)
        values = half(images, texts)
        assert not torch.equal(values, full)
        assert torch.allclose(values, full, atol=0.1, rtol=0.1)


def test_models_are_frozen_and_in_evaluation_mode(files):
    clip = rewards._load_clip("clipscore", files / "gelu", "cpu", torch.float32)
    detector = rewards.Mask2FormerDetector(
        str(files / "detector"), str(files / "gelu"), "cpu", torch.float32
    )
    model = rewards.ImageRewardModel(files / "ImageReward.pt", None, "cpu", torch.float32)
    for module in (clip.model, detector.model, detector.clip.model, model.vision, model.text):
        assert not module.training
        assert not any(p.requires_grad for p in module.parameters())


# ---- GenEval's detector ----


def loop(class_logits, mask_logits, padded, resized, size, least):
    """GenEval's instances as mmdet 2.x defines them, one pair of query and class at a time."""
    pairs = []
    for q, row in enumerate(class_logits.double()):
        probabilities = row.exp() / row.exp().sum()
        pairs += [(float(p), q, k) for k, p in enumerate(probabilities[:-1])]
    out = []
    for p, q, k in sorted(pairs, reverse=True)[:100]:
        logits = mask_logits[q][None, None].double()
        logits = TF.interpolate(logits, padded, mode="bilinear", align_corners=False)
        logits = logits[..., : resized[0], : resized[1]]
        logits = TF.interpolate(logits, size, mode="bilinear", align_corners=False)[0, 0]
        inside = [(y, x) for y in range(size[0]) for x in range(size[1]) if logits[y, x] > 0]
        if not inside:
            continue
        score = p * sum(1 / (1 + math.exp(-logits[y, x])) for y, x in inside) / len(inside)
        ys, xs = zip(*inside)
        if score > least:
            out.append((k, score, (min(xs), min(ys), max(xs) + 1, max(ys) + 1)))
    return out


@pytest.mark.parametrize("least", [0.0, 0.02])
def test_instances_equal_a_plain_loop(least):
    g = torch.Generator().manual_seed(3)
    classes, masks = 3 * torch.randn(4, 6, generator=g), torch.randn(4, 4, 4, generator=g)
    masks[2] -= 9  # empty
    given = classes, masks, (16, 16), (12, 16), (9, 12)
    found = instances(*given, min_score=least)
    wanted = loop(*given, least)
    assert [(i.label, i.box) for i in found] == [(k, box) for k, _, box in wanted]
    assert close([i.score for i in found], [score for _, score, _ in wanted], 1e-5)
    assert len(found) > 5


def test_at_most_a_hundred_instances():
    masks = torch.ones(3, 2, 2)
    found = instances(torch.randn(3, 81), masks, (8, 8), (8, 8), (8, 8), min_score=0.0)
    assert len(found) == 100
    assert [i.score for i in found] == sorted((i.score for i in found), reverse=True)


def test_an_instance_must_be_above_the_least_score():
    classes = torch.full((2, 81), -50.0)
    classes[0, 7] = classes[0, 80] = 0  # probability 1/2
    classes[1, 80] = 0  # no object
    masks = torch.full((2, 2, 2), 30.0)
    square = (8, 8), (8, 8), (8, 8)
    (only,) = instances(classes, masks, *square)
    assert (only.label, only.box) == (7, (0, 0, 8, 8))
    assert only.score == pytest.approx(0.5, abs=1e-6)
    assert instances(classes, masks, *square, min_score=0.5) == []
    # inside the mask a logit of 0.1 is a certainty of 0.52: 0.26 in all
    assert instances(classes, torch.full((2, 2, 2), 0.1), *square) == []


class Scene:
    """Stands for Mask2Former: a 40 x 60 picture holds objects (class, box, probability logit)."""

    def __init__(self, objects):
        self.objects = objects

    def __call__(self, pixel_values):
        from types import SimpleNamespace

        height, width = pixel_values.shape[2] // 4, pixel_values.shape[3] // 4
        classes = torch.full((len(self.objects), 81), -20.0)
        masks = torch.full((len(self.objects), height, width), -20.0)
        for q, (label, (x0, y0, x1, y1), logit) in enumerate(self.objects):
            classes[q, OBJECTS.index(label)], classes[q, 80] = logit, 0
            scale = 64 / 40 / 4  # of the shortest edge, then of the mask
            a, b, c, d = (round(n * scale) for n in (x0, y0, x1, y1))
            masks[q, b:d, a:c] = 20
        n = len(pixel_values)
        return SimpleNamespace(
            class_queries_logits=classes.expand(n, -1, -1),
            masks_queries_logits=masks.expand(n, -1, -1, -1),
        )


PALETTE = torch.tensor(list(VECTORS["geneval"]["palette_stub"].values())).float()


class Palette:
    """Stands for CLIP: the palette colour nearest to the middle pixel of the crop."""

    side = 28

    def embed_pixels(self, pixels):
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (rewards.CLIP_MEAN, rewards.CLIP_STD))
        middle = ((pixels * std + mean) * 255)[:, :, 14, 14]
        return TF.one_hot(torch.cdist(middle, PALETTE).argmin(1), len(COLORS)).float()

    def embed_texts(self, texts):
        named = [next(i for i, c in enumerate(COLORS) if f"a {c}" in text) for text in texts]
        return TF.one_hot(torch.tensor(named), len(COLORS)).float()


def detector_of(files, objects=None, clip=None) -> rewards.Mask2FormerDetector:
    detector = rewards.Mask2FormerDetector(
        str(files / "detector"), str(files / "gelu"), "cpu", torch.float32
    )
    detector.model = detector.model if objects is None else Scene(objects)
    detector.clip = clip or detector.clip
    return detector


LEFT, RIGHT = (5, 10, 25, 30), (35, 10, 55, 30)
SURE, LIKELY, UNLIKELY = 5.0, 1.0, -1.5  # probabilities 0.993, 0.73, 0.18


def test_crafted_logits_give_the_known_answer(files):
    image = torch.full((1, 3, 40, 60), 255, dtype=torch.uint8)
    image[0, :, 10:30, 5:25] = torch.tensor([255, 0, 0], dtype=torch.uint8).view(3, 1, 1)
    image[0, :, 10:30, 35:55] = torch.tensor([0, 0, 255], dtype=torch.uint8).view(3, 1, 1)
    scene = [("dog", LEFT, SURE), ("cat", RIGHT, LIKELY), ("cow", LEFT, UNLIKELY)]
    detector = detector_of(files, scene, Palette())
    include = [
        {"class": "dog", "count": 1, "color": "red"},
        {"class": "cat", "count": 1, "color": "blue", "position": ["right of", 0]},
    ]
    meta = {"tag": "position", "include": include}
    (found,) = detector(image, [meta])
    assert [(d.label, d.color) for d in found] == [("dog", "red"), ("cat", "blue")]
    assert np.abs(np.array([d.box for d in found]) - [LEFT, RIGHT]).max() <= 1
    assert close([d.score for d in found], [0.9933, 0.7311], 1e-3)
    assert geneval_score(found, meta) == (True, 1.0, True)

    def score(**change) -> tuple[float, float]:
        call = image, [""], [{**meta, **change}]
        return tuple(make_reward(n, detector=detector)(*call).item() for n in GENEVAL)

    assert score() == (1, 1)
    assert score(tag="counting") == (0, (1 + 1 + 0 + 0) / 4)  # the cat is not sure enough
    swapped = [include[0] | {"color": "blue"}, include[1]]
    assert score(include=swapped)[0] == 0
    assert score(exclude=[{"class": "dog", "count": 1}])[0] == 0


GENEVAL = ("geneval", "geneval_soft")


def test_only_classes_that_need_a_colour_get_one(files):
    scene = [("dog", LEFT, SURE), ("cat", RIGHT, SURE)]
    detector = detector_of(files, scene, Palette())
    image = torch.zeros(2, 3, 40, 60, dtype=torch.uint8)
    red_cat = {"tag": "colors", "include": [{"class": "cat", "count": 1, "color": "red"}]}
    plain = {"tag": "single_object", "include": [{"class": "cat", "count": 1}]}
    first, second = detector(image, [red_cat, plain])
    assert {d.label: d.color for d in first} == {"cat": "black", "dog": ""}
    assert {d.label: d.color for d in second} == {"cat": "", "dog": ""}


def test_a_crop_is_the_box_with_grey_outside_the_mask(files):
    class Recorder(Palette):
        def embed_pixels(self, pixels):
            self.pixels = pixels
            return super().embed_pixels(pixels)

    detector = detector_of(files, clip=Recorder())
    image = noise(1, 40)[0]
    mask = torch.zeros(40, 40, dtype=torch.bool)
    mask[8:36, 4:32] = True
    mask[20:, 20:] = False
    detector.classify(image, [rewards.Instance(DOG, 0.9, (4, 8, 32, 36), mask)])
    pil = Image.fromarray(image.permute(1, 2, 0).numpy())
    blank = Image.new("RGB", pil.size, "#999")
    crop = Image.composite(pil, blank, Image.fromarray(mask.numpy())).crop((4, 8, 32, 36))
    wanted = torch.from_numpy(np.array(crop)).permute(2, 0, 1)
    assert torch.equal(detector.clip.pixels, clip_pixels(wanted[None], 28))


def test_colour_texts_are_the_mean_over_the_templates(files):
    detector = detector_of(files)
    texts = detector.color_texts("tv remote")
    for color, row in zip(COLORS, texts):
        rows = detector.clip.embed_texts(
            [
                f"a photo of a {color} tv remote",
                f"a photo of a {color}-colored tv remote",
                f"a photo of a {color} object",
            ]
        )
        assert torch.allclose(row, rows.mean(0) / rows.mean(0).norm(), atol=1e-6)
    assert not torch.equal(texts, detector.color_texts("dog"))


def test_the_small_network_scores_as_a_plain_loop_over_its_output(files, loaded):
    detector = detector_of(files)
    image = noise(1, 40)[:, :, :, :24]
    pixels, resized = rewards.detector_pixels(image)
    out = detector.model(pixel_values=pixels)
    wanted = loop(
        out.class_queries_logits[0].detach(), out.masks_queries_logits[0].detach(),
        tuple(pixels.shape[2:]), resized, (40, 24), 0.3,
    )  # fmt: skip
    assert wanted
    assert {k for k, _, _ in wanted} == {DOG}
    meta = {"tag": "single_object", "include": [{"class": "dog", "count": 1}]}
    (found,) = detector(image, [meta])
    assert [d.box for d in found] == [box for _, _, box in wanted]
    assert close([d.score for d in found], [score for _, score, _ in wanted], 1e-5)
    by_hand = geneval_score([Detection("dog", s, box, "") for _, s, box in wanted], meta)
    for name, score in zip(GENEVAL, by_hand):
        assert loaded(name)(image, [""], [meta]).item() == pytest.approx(float(score))


@pytest.mark.parametrize(
    ("shape", "resized", "padded"),
    [
        ((512, 512), (800, 800), (800, 800)),
        ((64, 64), (800, 800), (800, 800)),
        ((480, 640), (800, 1067), (800, 1088)),
        ((640, 480), (1067, 800), (1088, 800)),
        ((100, 400), (333, 1333), (352, 1344)),
    ],
)
def test_the_picture_given_to_the_detector(shape, resized, padded, monkeypatch):
    monkeypatch.setattr(rewards, "DETECTOR_SIDES", (800, 1333))
    image = torch.full((1, 3, *shape), 255, dtype=torch.uint8)
    pixels, inner = rewards.detector_pixels(image)
    assert inner == resized
    assert tuple(pixels.shape) == (1, 3, *padded)
    assert (pixels[0, 0, : inner[0], : inner[1]] - (1 - 0.485) / 0.229).abs().max() < 1e-5
    assert pixels[0, :, inner[0] :].abs().sum() + pixels[0, :, :, inner[1] :].abs().sum() == 0


def test_a_checkpoint_of_other_classes_is_refused(files, tmp_path):
    import shutil

    for change in ({"0": "wall"}, {"79": "brush"}):
        folder = tmp_path / "-".join(change)
        shutil.copytree(files / "detector", folder)
        config = json.loads((folder / "config.json").read_text())
        config["id2label"] |= change
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(RewardUnavailable, match="not COCO's 80") as caught:
            make_reward("geneval", detector="mask2former", path=folder, clip_path=files / "gelu")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("clause", "field"),
    [({"class": "circle"}, "include[0].class"), ({"color": "grey"}, "include[0].color")],
)
def test_metadata_that_the_detector_cannot_answer(clause, field, loaded):
    meta = {"tag": "colors", "include": [{"class": "dog", "count": 1, "color": "red", **clause}]}
    with pytest.raises(ValueError, match="is none of the") as caught:
        loaded("geneval").check(meta)
    assert field in str(caught.value)
    assert loaded("geneval")(noise(1, 40), [""], [meta]).isnan().all()
    extra = {**METAS[0], "exclude": [{"class": "unicorn", "count": 1}]}
    with pytest.raises(ValueError, match=r"exclude\[0\].class"):
        loaded("geneval").check(extra)


def test_paths_belong_to_the_detector_of_photographs():
    for option in ("path", "clip_path"):
        with pytest.raises(ValueError, match="belong to detector='mask2former'"):
            make_reward("geneval_soft", **{option: "somewhere"})


# ---- checkpoints ----


def test_path_then_variable_then_hub(tmp_path, monkeypatch):
    for name in "abc":
        (tmp_path / name).mkdir()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **o: str(tmp_path / "c"))
    (tmp_path / "c" / "model.safetensors").touch()
    assert checkpoint("pickscore", "org/name", "1 GB") == tmp_path / "c"
    monkeypatch.setenv("REWARD_PICKSCORE_PATH", str(tmp_path / "b"))
    assert checkpoint("pickscore", "org/name", "1 GB") == tmp_path / "b"
    assert checkpoint("pickscore", "org/name", "1 GB", tmp_path / "a") == tmp_path / "a"
    assert checkpoint("clipscore", "org/name", "1 GB") == tmp_path / "c"
    monkeypatch.setenv("REWARD_HPSV2_TOKENIZER", str(tmp_path / "a"))
    assert checkpoint("hpsv2", "org/name", "1 GB", option="tokenizer") == tmp_path / "a"


def test_a_file_may_be_given_by_its_folder(tmp_path):
    file = tmp_path / "w.pt"
    file.touch()
    for given in (file, tmp_path, str(file)):
        assert checkpoint("hpsv2", "org/name", "1 GB", given, files=["w.pt"]) == file
    other = tmp_path / "renamed.pt"
    other.touch()
    assert checkpoint("hpsv2", "org/name", "1 GB", other, files=["w.pt"]) == other


def test_the_cache_is_asked_before_the_network(tmp_path, monkeypatch):
    calls = []

    def hub(hub_id, allow_patterns, local_files_only):
        calls.append((hub_id, allow_patterns, local_files_only))
        if not local_files_only:
            (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    for _ in range(2):  # a cached folder without the weights does not count
        assert checkpoint("pickscore", "org/name", "1 GB") == tmp_path
    assert [cached for _, _, cached in calls] == [True, False, True]
    assert calls[0][:2] == ("org/name", list(rewards.MODEL))


REMEDIES = {
    "clipscore": ({}, "openai/clip-vit-large-patch14", "1.7 GB", "path=FOLDER", "PATH"),
    "pickscore": ({}, "yuvalkirstain/PickScore_v1", "3.9 GB", "path=FOLDER", "PATH"),
    "aesthetic": ({}, "openai/clip-vit-large-patch14", "1.7 GB", "path=FOLDER", "PATH"),
    "hpsv2": ({}, "xswu/HPSv2", "2.0 GB", "path=FILE", "PATH"),
    "imagereward": ({}, "zai-org/ImageReward", "1.8 GB", "path=FILE", "PATH"),
    "geneval": (
        {"detector": "mask2former"}, "facebook/mask2former-swin-small-coco-instance", "275 MB",
        "path=FOLDER", "PATH",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REMEDIES)
def test_a_missing_checkpoint_is_one_line_with_the_remedy(name, tmp_path, monkeypatch):
    options, hub_id, size, keyword, variable = REMEDIES[name]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(RewardUnavailable) as caught:
        make_reward(name, **options)
    line = str(caught.value)
    assert "\n" not in line
    wanted = f"reward '{name}' needs {hub_id} ({size}): `hf download {hub_id} "
    assert line.startswith(wanted)
    assert f"or give {keyword}, or set REWARD_{name.upper()}_{variable}" in line


def test_the_second_part_of_a_reward_has_a_remedy_of_its_own(files):
    for call, remedy in [
        (dict(name="aesthetic", path=files / "quick"), "or give head=FILE, or set REWARD_AESTHETIC_HEAD"),
        (dict(name="hpsv2", path=files / "hps"), "give tokenizer=FOLDER, or set REWARD_HPSV2_TOKENIZER"),
        (dict(name="imagereward", path=files / "ImageReward.pt"), "google-bert/bert-base-uncased"),
        (
            dict(name="geneval", detector="mask2former", path=files / "detector"),
            "or give clip_path=FOLDER, or set REWARD_GENEVAL_CLIP_PATH",
        ),
    ]:  # fmt: skip
        with pytest.raises(RewardUnavailable, match=remedy):
            make_reward(**call)


@pytest.mark.parametrize("source", ["path", "variable"])
def test_a_path_that_is_not_there_names_where_it_was_given(source, tmp_path, monkeypatch):
    gone = str(tmp_path / "gone")
    if source == "variable":
        monkeypatch.setenv("REWARD_HPSV2_PATH", gone)
    opts = {"path": gone} if source == "path" else {}
    with pytest.raises(RewardUnavailable) as caught:
        make_reward("hpsv2", **opts)
    named = "path" if source == "path" else "the environment variable REWARD_HPSV2_PATH"
    line = str(caught.value)
    assert f"{named} is '{gone}'" in line
    assert "`hf download xswu/HPSv2 HPS_v2.1_compressed.pt`" in line
    with pytest.raises(RewardUnavailable, match="which is no folder"):
        make_reward("clipscore", path=__file__)


class Trap:
    """Runs a command when it is unpickled by anything but weights_only=True."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (os.mkdir, (str(self.target),))


@pytest.mark.parametrize("content", ["code", "text", "tensors", "half"])
def test_a_foreign_or_broken_file_is_one_line_and_never_run(content, files, tmp_path):
    file, hit = tmp_path / "weights.pt", tmp_path / "hit"
    if content == "code":
        torch.save({"visual.proj": Trap(hit)}, file)
    elif content == "text":
        file.write_text("no checkpoint")
    elif content == "tensors":
        torch.save({"other": torch.ones(2)}, file)
    else:
        part = state(HPS["shapes"])
        del part["visual.ln_post.bias"]
        torch.save(part, file)
    with pytest.raises(RewardUnavailable) as caught:
        make_reward("hpsv2", path=file, tokenizer=files / "bpe")
    assert "\n" not in str(caught.value)
    assert "hpsv2" in str(caught.value)
    assert not hit.exists()
    assert content != "half" or "vision_model.post_layernorm.bias" in str(caught.value)


# what builds a network from each file, and the file
TORCH_FILES = {
    "hpsv2": ("hps/HPS_v2.1_compressed.pt", dict(tokenizer="bpe"), "path"),
    "imagereward": ("ImageReward.pt", dict(tokenizer="bert"), "path"),
    "aesthetic": ("head.pth", dict(path="quick"), "head"),
}


@pytest.mark.parametrize("name", TORCH_FILES)
def test_no_tensor_of_a_torch_file_may_be_missing(name, files, tmp_path):
    """Whichever it is: one line, never a KeyError, never a network that goes without."""
    source, others, option = TORCH_FILES[name]
    whole = torch.load(files / source)
    whole = whole.get("state_dict", whole)
    others = {key: files / value for key, value in others.items()}
    unused = re.compile(r"^blip\.\w+_proj\." if name == "imagereward" else "$^")
    for key in whole:
        if unused.search(key) or re.search(r"(resblocks|blocks|layer)\.1\.", key):
            continue  # of no network here, or as those of layer 0
        part = {k: value for k, value in whole.items() if k != key}
        torch.save(part, tmp_path / "part.pt")
        with pytest.raises(RewardUnavailable) as caught:
            make_reward(name, **others, **{option: tmp_path / "part.pt"})
        assert "\n" not in str(caught.value), key


@pytest.mark.parametrize("content", [None, b"", b"{}", b"null", b"[]", b"\xff\xfe"])
@pytest.mark.parametrize("name", ["clipscore", "hpsv2", "imagereward"])
def test_a_tokenizer_that_is_absent_or_broken_is_one_line(name, content, files, tmp_path):
    """transformers 5 makes a tokenizer without words of a folder without its file."""
    source, file, others = {
        "clipscore": ("gelu", "tokenizer.json", {}),
        "hpsv2": ("bpe", "vocab.json", dict(path=files / "hps")),
        "imagereward": ("bert", "vocab.txt", dict(path=files / "ImageReward.pt")),
    }[name]
    folder = tmp_path / "folder"
    shutil.copytree(files / source, folder)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(RewardUnavailable, match=r"no (CLIP|Bert)Tokenizer in") as caught:
        make_reward(name, **{"path" if name == "clipscore" else "tokenizer": folder}, **others)
    assert "\n" not in str(caught.value)


def test_a_folder_of_another_model_is_refused_rather_than_completed_at_random(files):
    with pytest.raises(RewardUnavailable, match=r"no CLIPModel in .*missing or of another shape"):
        make_reward("clipscore", path=_mixed(files))
    with pytest.raises(RewardUnavailable, match=r"no CLIP(Tokenizer|Model) in"):
        make_reward("clipscore", path=files / "detector")


def _mixed(files: Path) -> Path:
    """The tokenizer and config of one CLIP with the weights of another network."""
    folder = files / "mixed"
    shutil.copytree(files / "gelu", folder, dirs_exist_ok=True)
    shutil.copy(files / "detector" / "model.safetensors", folder)
    return folder


def test_a_head_may_be_a_safetensors_file(files, loaded, tmp_path):
    from safetensors.torch import save_file

    save_file(state(LEGACY["aesthetic_head_shapes"]), tmp_path / "model.safetensors")
    reward = make_reward("aesthetic", path=files / "quick", head=tmp_path)
    assert one_by_one(reward) == one_by_one(loaded("aesthetic"))


def test_half_precision_checkpoints_are_computed_in_fp32(files, loaded, tmp_path):
    half = {key: value.half() for key, value in state(HPS["shapes"]).items()}
    torch.save({"state_dict": half}, tmp_path / "half.pt")
    reward = make_reward("hpsv2", path=tmp_path / "half.pt", tokenizer=files / "bpe")
    values, wanted = one_by_one(reward), one_by_one(loaded("hpsv2"))
    assert close(values, wanted, 1e-2)
    torch.save({key: value.float() for key, value in half.items()}, tmp_path / "full.pt")
    full = make_reward("hpsv2", path=tmp_path / "full.pt", tokenizer=files / "bpe")
    assert one_by_one(full) == values


@pytest.mark.parametrize("module", ["transformers", "torchvision", "huggingface_hub"])
def test_a_missing_package_is_one_line(module, files, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    opts = {} if module == "huggingface_hub" else {"path": files / "gelu"}
    with pytest.raises(RewardUnavailable, match=f"pip install {module}"):
        make_reward("clipscore", **opts)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hpsv2", {"version": "v3"}, "version must be one of v2.0, v2.1, got 'v3'"),
        ("hpsv2", {"scale": 0}, "scale must be"),
        ("clipscore", {"scale": math.nan}, "scale must be"),
        ("pickscore", {"scale": -26}, "scale must be"),
    ],
)
def test_bad_options_fail_before_anything_is_loaded(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_reward(name, **options)


def test_the_older_hps_is_another_file():
    with pytest.raises(RewardUnavailable, match=r"hf download xswu/HPSv2 HPS_v2_compressed.pt`"):
        make_reward("hpsv2", version="v2.0")


# ---- python rewards.py --check ----


@pytest.fixture
def check(capsys):
    """check(*arguments) -> (exit status, what it printed)."""

    def run(*arguments) -> tuple[object, str]:
        with pytest.raises(SystemExit) as caught:
            rewards.main([str(a) for a in arguments])
        return caught.value.code, capsys.readouterr().out

    return run


@pytest.fixture
def png(tmp_path) -> Path:
    file = tmp_path / "sine.png"
    Image.fromarray(inputs.test_image("sine", 64)).save(file)
    return file


def test_check_scores_a_picture_on_the_native_scale(check, png, files):
    at = ("--option", f"path={files / 'gelu'}")
    code, out = check("--check", "pickscore", "--image", png, "--prompt", "a cat", *at)
    reward = make_reward("pickscore", path=files / "gelu", scale=1)
    value = reward(PICTURES[0][None], ["a cat"]).item()
    assert (code, out) == (0, f"pickscore: {value:.6g}\n")
    scaled = (*at, "--option", "scale=26")
    code, out = check("--check", "pickscore", "--image", png, "--prompt", "a cat", *scaled)
    assert float(out.split()[1]) == pytest.approx(value / 26, rel=1e-5)
    assert check("--check", "pickscore", *at)[0] == 0


def test_check_says_what_is_missing(check):
    code, out = check("--check", "imagereward")
    assert code == 1
    assert out.startswith("imagereward: cannot run: reward 'imagereward' needs zai-org/ImageReward")
    assert out.count("\n") == 1


def test_check_all(check):
    code, out = check("--check", "all")
    assert code == 1
    lines = dict(line.split(": ", 1) for line in out.splitlines())
    assert set(lines) == set(rewards.REWARDS)
    assert lines["geneval"] == lines["jpeg_compressibility"] == "can run on this machine, cpu"
    assert lines["aesthetic"].startswith("cannot run")


def test_check_takes_the_metadata_of_geneval_as_its_prompt(check, tmp_path):
    from tiny.world import ShapeDetector

    images, (meta,) = ShapeDetector().self_test_case()
    file = tmp_path / "scene.png"
    Image.fromarray(images[0].permute(1, 2, 0).numpy()).save(file)
    line = json.dumps({"prompt": "a scene", **meta})
    assert check("--check", "geneval", "--image", file, "--prompt", line) == (0, "geneval: 1\n")
    code, out = check("--check", "geneval", "--image", file, "--prompt", "a scene")
    assert (code, out) == (1, "geneval: nan\n")
    code, out = check("--check", "geneval", "--image", file, "--prompt", '{"prompt": ')
    assert code == 1
    assert "not valid JSON" in out


def test_check_passes_options_on(check):
    code, out = check("--check", "geneval", "--option", "detector=mask2former")
    assert code == 1
    assert "facebook/mask2former" in out
    assert "has no option 'nonsense'" in check("--check", "hpsv2", "--option", "nonsense=1")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--check", "clip"], "--check: unknown reward 'clip'"),
        (["--check", "hpsv2", "--image", "a.png"], "--image: give --image FILE and --prompt TEXT"),
        (["--check", "hpsv2", "--prompt", "a"], "--image: give --image FILE and --prompt TEXT"),
        (["--check", "hpsv2", "--option", "x"], "--option: 'x' is not KEY=VALUE"),
        (["--check", "all", "--option", "scale=2"], "--option: belongs to one reward"),
        (["--check", "hpsv2", "--image", __file__, "--prompt", ""], "is no JPEG, PNG"),
        (["--check", "hpsv2", "--image", "gone.png", "--prompt", ""], "--image: gone.png is no"),
    ],
)
def test_check_refuses_bad_arguments(check, arguments, message):
    code, out = check(*arguments)
    assert message in str(code)
    assert out == ""


def test_check_as_a_command():
    code = [sys.executable, "rewards.py", "--check", "jpeg_compressibility"]
    run = subprocess.run(code, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "jpeg_compressibility: can run on this machine, cpu\n"
