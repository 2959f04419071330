"""The embedded world (tiny/world.py) and its pre-training (tiny/pretrain.py)."""

import functools
import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import SMALL
from torch.testing import assert_close

import rewards
from tiny import pretrain, world

ROOT = Path(__file__).parent.parent
exact = functools.partial(assert_close, rtol=0, atol=0)
CONTENTS = [(task, meta) for task in world.TASKS for meta in world.contents(task)]
SIDES = dict(zip(("train", "heldout"), world.split_prompts()))


def key(meta):
    """The content of a row, without its wording."""
    return json.dumps({k: v for k, v in meta.items() if k != "prompt"}, sort_keys=True)


def scene(meta, seed=0):
    return world.sample_scene(meta, random.Random(seed))


def detect(*images):
    return world.ShapeDetector()(torch.stack(images), [{}] * len(images))


# ---- captions and splits ----


def test_contents():
    assert Counter(task for task, _ in CONTENTS) == {
        "single_object": 3, "two_object": 6, "counting": 9, "colors": 15, "position": 24,
        "color_attr": 120,
    }  # fmt: skip
    assert len({meta["prompt"] for _, meta in CONTENTS}) == len(CONTENTS)
    assert len({key(meta) for _, meta in CONTENTS}) == len(CONTENTS)
    for task, meta in CONTENTS:
        assert meta["tag"] == task
        rewards.check_metadata(meta)


def test_metadata_says_what_the_caption_says():
    for _, meta in CONTENTS:
        words = meta["prompt"].split()
        for clause in meta["include"]:
            plural = "s" if clause["count"] > 1 else ""
            assert clause["class"] + plural in words
            if "color" in clause:
                assert f"{clause['color']} {clause['class']}" in meta["prompt"]
            if clause["count"] > 1:
                assert world.NUMBERS[clause["count"]] in words
            if "position" in clause:
                relation, target = clause["position"]
                other = meta["include"][target]["class"]
                assert f"a {clause['class']} {relation} a {other}" == meta["prompt"]


def test_relations_are_those_of_the_reward():
    assert set(world.RELATIONS) == set(rewards.RELATIONS)
    assert world.Detection._fields == rewards.Detection._fields


def test_no_held_out_text_is_trained_on():
    texts = {side: [m["prompt"] for rows in SIDES[side].values() for m in rows] for side in SIDES}
    assert not set(texts["train"]) & set(texts["heldout"])
    assert len(set(texts["train"])) == len(texts["train"])
    assert len(texts["train"]) + len(texts["heldout"]) == len(CONTENTS) * len(world.PREFIXES)
    words = {side: {w for text in texts[side] for w in text.split()} for side in SIDES}
    assert words["heldout"] <= words["train"]


@pytest.mark.parametrize("task", world.TASKS)
def test_compositions_are_held_out_whole(task):
    seen = {side: {key(m) for m in SIDES[side][task]} for side in SIDES}
    unseen = seen["heldout"] - seen["train"]
    wanted = {"colors": 3, "color_attr": 24, "position": 4}
    assert len(unseen) == wanted.get(task, 0)
    assert seen["train"] | seen["heldout"] == {key(m) for t, m in CONTENTS if t == task}
    assert SIDES["train"][task]
    assert SIDES["heldout"][task]


def test_splits_do_not_depend_on_the_process(tmp_path):
    world.write_prompts(tmp_path)
    for side, n in (("train", 1200), ("heldout", 512)):
        text = (tmp_path / f"{side}.jsonl").read_text()
        assert text == (ROOT / f"tiny/prompts/{side}.jsonl").read_text()
        rows = rewards.read_prompts(tmp_path / f"{side}.jsonl")
        assert len(rows) == n
        allowed = {m["prompt"] for ms in SIDES[side].values() for m in ms}
        assert {row["prompt"] for row in rows} <= allowed


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("n", [6, 48, 100, 512])
def test_any_prefix_is_balanced(side, n):
    counts = Counter(m["tag"] for m in world.interleave(SIDES[side], 600, 0)[:n])
    assert max(counts.values()) - min(counts.values()) <= 1
    assert len(counts) == 6


def test_interleave_repeats_no_row_before_its_task_is_used_up():
    rows = world.interleave(SIDES["train"], 6 * 12, 3)
    singles = [m["prompt"] for m in rows if m["tag"] == "single_object"]
    assert len(set(singles)) == len(singles) == 12  # of 12
    assert rows == world.interleave(SIDES["train"], 6 * 12, 3)
    assert rows != world.interleave(SIDES["train"], 6 * 12, 4)


# ---- scenes and pictures ----


@pytest.mark.parametrize("task", world.TASKS)
def test_a_scene_is_exactly_what_the_caption_says(task):
    for i, meta in enumerate(world.contents(task)):
        shapes = scene(meta, i).shapes
        wanted = Counter()
        for clause in meta["include"]:
            wanted[clause["class"]] += clause["count"]
            if "color" in clause:
                assert [s.color for s in shapes if s.kind == clause["class"]] == [clause["color"]]
        assert Counter(s.kind for s in shapes) == wanted
        boxes = []
        for s in shapes:
            w, h = world.half_extent(s.kind, s.radius)
            boxes.append((s.x - w, s.y - h, s.x + w, s.y + h))
            assert min(boxes[-1]) >= 0
            assert max(boxes[-1]) <= world.SIZE
        for a, b in itertools.combinations(boxes, 2):
            gaps = (a[0] - b[2], b[0] - a[2], a[1] - b[3], b[1] - a[3])
            assert max(gaps) > world.GAP - 1e-6
        if task == "position":
            relation = meta["include"][1]["position"][0]
            assert relation in rewards.relative_position(boxes[1], boxes[0])


def test_scenes_vary_and_repeat():
    meta = world.contents("two_object")[0]
    assert scene(meta, 1) == scene(meta, 1)
    scenes = [scene(meta, i) for i in range(20)]
    assert len(set(scenes)) == 20
    assert len({s.color for sc in scenes for s in sc.shapes}) == 5


def test_render():
    shapes = (
        world.Shape("square", "red", 20.0, 32.0, 10.0),
        world.Shape("circle", "blue", 48.0, 20.0, 9.0),
    )
    image = world.render(world.Scene(shapes, 0.9))
    assert image.shape == (3, 64, 64)
    assert image.dtype == torch.uint8
    assert image[:, 63, 63].tolist() == [round(0.9 * 255)] * 3
    assert tuple(image[:, 32, 20].tolist()) == world.COLORS["red"]
    assert tuple(image[:, 20, 48].tolist()) == world.COLORS["blue"]
    ground = image[:, 63, 63][:, None, None].float()
    full = torch.tensor(world.COLORS["blue"])[:, None, None] - ground
    cover = ((image.float() - ground) / full)[0][:, 36:]  # red channel, around the circle
    assert cover.sum().item() == pytest.approx(3.1416 * 81, rel=0.02)
    soft = ((cover > 0.1) & (cover < 0.9)).sum()
    assert soft > 20  # an anti-aliased rim


# ---- detector ----


@pytest.mark.parametrize("task", world.TASKS)
def test_the_detector_finds_every_scene(task):
    """Every content, twice: the right caption scores 1 by GenEval's rule and by the soft one."""
    metas = [meta for meta in world.contents(task) for _ in range(2)]
    scenes = [scene(meta, i) for i, meta in enumerate(metas)]
    images = [world.render(s) for s in scenes]
    right, boxes = 0, []
    for meta, found, truth in zip(metas, detect(*images), scenes):
        score = rewards.geneval_score(found, meta)
        right += score.benchmark and score.soft == 1 and score.strict
        if len(found) == len(truth.shapes):
            for s in truth.shapes:
                w, h = world.half_extent(s.kind, s.radius)
                near = min(found, key=lambda d: abs(d.box[0] + w - s.x) + abs(d.box[1] + h - s.y))
                assert (near.label, near.color) == (s.kind, s.color)
                wanted = (s.x - w, s.y - h, s.x + w, s.y + h)
                boxes += [abs(a - b) for a, b in zip(near.box, wanted)]
    assert right >= 0.99 * len(metas)
    assert max(boxes) < 3


@pytest.mark.parametrize("task", ["single_object", "counting", "colors", "position", "color_attr"])
def test_the_detector_denies_other_captions(task):
    metas = world.contents(task)[:12]
    images = [world.render(scene(meta, i)) for i, meta in enumerate(metas)]
    for shown, found in zip(metas, detect(*images)):
        for meta in metas:
            if shown != meta and not (task == "position" and _turned(shown, meta)):
                assert not rewards.geneval_score(found, meta).benchmark, (shown, meta)


def _turned(a, b):
    """'a circle left of a square' also shows 'a square right of a circle'."""
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    relation = a["include"][1]["position"][0]
    return [c["class"] for c in a["include"]] == [c["class"] for c in reversed(b["include"])] and b[
        "include"
    ][1]["position"][0] == opposite[relation]


def test_nothing_is_seen_where_nothing_is():
    g = torch.Generator().manual_seed(0)
    grey = torch.randint(0, 255, (1, 64, 64), generator=g).expand(3, -1, -1).to(torch.uint8)
    speck = torch.full((3, 64, 64), 240, dtype=torch.uint8)
    speck[1:, :7, :7] = 0
    assert detect(torch.full((3, 64, 64), 240, dtype=torch.uint8), grey.contiguous(), speck) == [
        [],
        [],
        [],
    ]
    assert world.ShapeDetector()(torch.zeros(0, 3, 64, 64, dtype=torch.uint8), []) == []


def paint(mask, color="red"):
    image = torch.full((3, 64, 64), 240, dtype=torch.uint8)
    image[:, mask] = torch.tensor(world.COLORS[color], dtype=torch.uint8)[:, None]
    return image


def test_bad_shapes_score_low():
    y, x = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    x, y = x - 32, y - 32
    circle = x**2 + y**2 < 100
    (good,) = detect(paint(circle))[0]
    assert good.label == "circle"
    assert good.score > 0.95
    rounded = (x.abs() ** 3 + y.abs() ** 3) < 10.0**3  # between circle and square
    bar = (x.abs() < 20) & (y.abs() < 8)
    ring = circle & (x**2 + y**2 > 49)
    half = paint(circle)
    half[:, circle & (x > 0)] = torch.tensor(world.COLORS["blue"], dtype=torch.uint8)[:, None]
    for image in (paint(rounded), paint(bar), paint(ring), half):
        for found in detect(image)[0]:
            assert found.score < 0.7  # below the 0.9 of counting


def test_the_self_test_of_the_rewards_uses_it():
    images, metas = world.ShapeDetector().self_test_case()
    assert images.shape == (1, 3, 64, 64)
    assert rewards.geneval_score(detect(*images)[0], metas[0]).benchmark


# ---- pre-training: tokenizer ----


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return pretrain.make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_every_word_of_the_captions_is_one_token(tokenizer):
    texts = [m["prompt"] for side in SIDES.values() for rows in side.values() for m in rows]
    ids = tokenizer(texts).input_ids
    for text, row in zip(texts, ids):
        assert len(row) == len(text.split()) + 2, text
        assert len(row) <= pretrain.TEXT_TOKENS
    assert len({tuple(row) for row in ids}) == len(texts)
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == len(tokenizer) - 1


def test_any_other_text_falls_back_to_bytes(tokenizer):
    for text in ("xylophone", "ünïcode", "a zebra, 7 owls", "日本"):
        ids = tokenizer(text, truncation=False).input_ids[1:-1]
        assert len(ids) > len(text.split())
        assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "")


def test_the_tokenizer_does_not_depend_on_the_process(tokenizer, tmp_path):
    pretrain.make_tokenizer(tmp_path)
    for name in ("vocab.json", "merges.txt"):
        again = (tmp_path / name).read_text()
        assert again == (Path(tokenizer.name_or_path) / name).read_text()


# ---- pre-training: noisy captions ----


def test_a_misread_caption_says_something_else_of_the_same_kind():
    """Word by word, known texts alone, and a pair stays a pair of two."""
    kinds = [set(world.SHAPES), {s + "s" for s in world.SHAPES}, set(world.COLORS)]
    kinds += [set(world.NUMBERS.values()), {"left", "right"}, {"above", "below"}]
    captions = [m["prompt"] for rows in SIDES["train"].values() for m in rows]
    known, rng = set(captions), random.Random(0)
    swapped = set()
    for caption in captions * 5:
        before, after = caption.split(" "), pretrain.misread(caption, 0.2, known, rng).split(" ")
        assert " ".join(after) in known
        assert len(after) == len(before)
        for a, b in zip(before, after):
            if a != b:
                (kind,) = [i for i, words in enumerate(kinds) if a in words]
                assert b in kinds[kind]
                swapped.add(kind)
    assert swapped == set(range(len(kinds)))


def test_words_are_misread_at_the_given_rate_or_never():
    train = SIDES["train"]
    known = {m["prompt"] for rows in train.values() for m in rows}
    rng = random.Random(0)
    for task, words in (("single_object", 1), ("two_object", 2), ("color_attr", 4)):
        captions = [m["prompt"] for m in train[task]] * 40
        same = [pretrain.misread(c, 0.2, known, rng) == c for c in captions]
        # a little above 0.8 ** words: what would be held out is drawn anew
        assert 0.8**words - 0.02 < sum(same) / len(same) < 0.8**words + 0.12, task
        assert all(pretrain.misread(c, 0.0, known, rng) == c for c in captions)


def test_captions_are_noisy_while_the_last_cycle_anneals(small, tmp_path, monkeypatch):
    """Steps 0 to 6 of 8 see the exact caption, the last quarter of the second cycle the other."""
    seen, rates = [], []
    make, loss, name, export = pretrain.KINDS["sd3"]

    def spy(models, x0, ids, g):
        seen.append(set(ids[:, 1:].flatten().tolist()))
        return loss(models, x0, ids, g)

    def set_lr(optimizer, lr):
        rates.append(lr)

    monkeypatch.setitem(pretrain.KINDS, "sd3", (make, spy, name, export))
    monkeypatch.setattr(pretrain, "set_lr", set_lr)
    monkeypatch.setattr(pretrain, "misread", lambda caption, *_: "two squares")
    captions = ["a circle"] * 6 + ["two squares"] * 6
    z = torch.randn(12, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    pretrain.train_model(make_args(steps=8, batch=32), z, captions, tmp_path)
    circle = pretrain.make_tokenizer(tmp_path)("circle").input_ids[1]
    assert [circle in ids for ids in seen] == [True] * 7 + [False]
    assert rates[:4] == rates[4:]


def test_a_cycle_starts_from_the_average_with_a_new_optimizer(small, tmp_path, monkeypatch):
    make, loss, name, export = pretrain.KINDS["sd3"]
    z, captions = torch.randn(8, 4, 16, 16), ["a circle", "two squares"] * 4
    pretrain.train_model(make_args(steps=4), z, captions, tmp_path)
    before, first = torch.load(tmp_path / name), []

    def spy(models, x0, ids, g):
        first.append({k: v.clone() for k, v in models.state_dict().items()})
        return loss(models, x0, ids, g)

    monkeypatch.setitem(pretrain.KINDS, "sd3", (make, spy, name, export))
    pretrain.train_model(make_args(steps=5), z, captions, tmp_path)
    assert all(torch.equal(v, before["ema"][k]) for k, v in first[0].items())
    assert any(not torch.equal(v, before["models"][k]) for k, v in first[0].items())
    steps = [s["step"].item() for s in torch.load(tmp_path / name)["optimizer"]["state"].values()]
    assert set(steps) == {1}


# ---- pre-training: training ----


@pytest.fixture
def small(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(pretrain, name, value)


def make_args(**changes):
    return pretrain.Args(
        **{**dict(scenes=24, vae_steps=2, steps=4, cycle=4, batch=4, save_every=2), **changes}
    )


@pytest.mark.parametrize(("kind", "name"), [("sd3", "flow.pt"), ("sd", "eps.pt")])
def test_a_resumed_pretraining_is_bit_for_bit(small, tmp_path, monkeypatch, kind, name):
    g = torch.Generator().manual_seed(0)
    z = torch.randn(12, 4, 16, 16, generator=g)
    captions = ["a circle", "two squares", "a red circle"] * 4
    args = make_args(kind=kind)

    def train(work):
        work.mkdir(exist_ok=True)
        pretrain.train_model(args, z, captions, work)
        return torch.load(work / name, weights_only=True)

    whole = train(tmp_path / "whole")
    original = pretrain.save_atomic

    def save_and_die(state, path):
        original(state, path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pretrain, "save_atomic", save_and_die)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "two")
    assert torch.load(tmp_path / "two" / name, weights_only=True)["step"] == 2
    torch.manual_seed(99)  # nothing may hang on the global generator
    resumed = train(tmp_path / "two")
    exact(resumed, whole)
    assert whole["step"] == 4
    different = [k for k, v in whole["models"].items() if not torch.equal(v, whole["ema"][k])]
    assert different


def test_the_whole_recipe_exports_a_stock_pipeline(small, tmp_path, make_policy):
    from diffusers import StableDiffusion3Pipeline

    args = make_args(out=str(tmp_path / "sd3"), work=str(tmp_path / "work"))
    pretrain.main(args)
    policy = make_policy(random=False, folder=args.out)
    parts = dict.fromkeys(("text_encoder_3", "tokenizer_3", "image_encoder", "feature_extractor"))
    pipe = StableDiffusion3Pipeline.from_pretrained(args.out, **parts)
    assert {
        p.dtype for m in (pipe.transformer, pipe.vae, pipe.text_encoder) for p in m.parameters()
    } == {torch.float32}
    models = pretrain.make_models(len(pipe.tokenizer))
    saved = torch.load(tmp_path / "work" / "flow.pt", weights_only=True)
    models.load_state_dict(saved["ema"])

    captions = ["a circle", "draw a red circle and a blue square"]
    ids = pipe.tokenizer(captions, padding="max_length", return_tensors="pt").input_ids
    with torch.no_grad():
        tokens, pooled = pretrain.encode_text(models, ids)
    c = policy.encode(captions)
    assert_close(c, {"tokens": tokens, "pooled": pooled}, rtol=1e-5, atol=1e-5)
    g = torch.Generator().manual_seed(0)
    x, t = torch.randn(2, 4, 16, 16, generator=g), torch.tensor([0.3, 0.9])
    with torch.no_grad():
        v = models["transformer"](x, tokens, pooled, 1000 * t, return_dict=False)[0]
        assert_close(policy.velocity(x, t, c), v, rtol=1e-2, atol=1e-2)  # stored in fp16

    latents = torch.load(tmp_path / "work" / "latents.pt", weights_only=True)
    images, _ = pretrain.make_data(args.scenes, args.seed)
    with torch.no_grad():
        z = policy.vae.encoder(images.float() / 127.5 - 1)
    scaled = (z - policy.vae.config.shift_factor) * policy.vae.config.scaling_factor
    assert_close(scaled, latents, rtol=1e-2, atol=2e-2)
    assert abs(latents.mean()) < 0.05
    assert abs(latents.std() - 1) < 0.05


def test_the_sd_recipe_exports_a_stock_pipeline(small, tmp_path):
    """Its noise is that of the trained UNet, and its schedule Stable Diffusion's own."""
    import diffusers

    import common

    args = make_args(kind="sd", out=str(tmp_path / "sd"), work=str(tmp_path / "work"))
    pretrain.main(args)
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(args.out)
    assert isinstance(pipe.scheduler, diffusers.DDIMScheduler)
    abar = pipe.scheduler.alphas_cumprod
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    assert_close(abar, (1 - betas).cumprod(0))
    assert abar[-1].item() == pytest.approx(0.00466, abs=1e-5)

    policy = common.load_policy("sd15", args.out, lora_r=2)
    models = pretrain.make_sd_models(len(pipe.tokenizer))
    models.load_state_dict(torch.load(tmp_path / "work" / "eps.pt", weights_only=True)["ema"])
    captions = ["a circle", "draw a red circle and a blue square"]
    ids = pipe.tokenizer(captions, padding="max_length", return_tensors="pt").input_ids
    x = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tokens = models["text_encoder"](ids)[0]
        c = policy.encode(captions)
        assert_close(c["tokens"], tokens, rtol=1e-5, atol=1e-5)
        eps = models["unet"](x, torch.tensor([299, 799]), tokens, return_dict=False)[0]
        found = policy.predict(x, torch.tensor([0.3, 0.8]), c)
    assert_close(found, eps, rtol=2e-2, atol=2e-2)  # stored in fp16


def test_data_are_training_captions_only():
    images, captions = pretrain.make_data(30, 0)
    assert images.shape == (30, 3, 64, 64)
    heldout = {m["prompt"] for rows in SIDES["heldout"].values() for m in rows}
    assert not heldout & set(captions)
    again, _ = pretrain.make_data(30, 0)
    exact(again, images)


def test_the_learning_rate_warms_up_holds_and_anneals():
    values = [pretrain.schedule(step, 1000, 0.75) for step in range(1000)]
    assert values[0] == 1 / 200
    assert set(values[199:750]) == {1.0}
    assert all(a >= b for a, b in zip(values[750:], values[751:]))
    assert values[-1] == pytest.approx(0.02, abs=1e-3)


def test_a_cycle_that_the_steps_do_not_fill_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="--cycle: 10 steps are no whole number of 4"):
        pretrain.main(make_args(steps=10, work=str(tmp_path / "work")))
    assert not (tmp_path / "work").exists()


def test_update_ema():
    a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    wanted = 0.9 * a.weight.detach() + 0.1 * b.weight.detach()
    kept = b.weight.detach().clone()
    pretrain.update_ema(a, b, 0.9)
    assert_close(a.weight.detach(), wanted)
    exact(b.weight.detach(), kept)
