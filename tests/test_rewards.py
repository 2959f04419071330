"""rewards.py: the contract of every reward, JPEG size, GenEval's rule, prompt files."""

import gc
import importlib.util
import json
import logging
import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rewards
from rewards import (
    REWARDS,
    Detection,
    Reward,
    RewardUnavailable,
    check_metadata,
    geneval_score,
    jpeg_kilobytes,
    make_reward,
    read_prompts,
    relative_position,
    to_uint8,
)

GOLDEN = Path(__file__).parent / "golden"
VECTORS = json.loads((GOLDEN / "rewards.json").read_text())
ROOT = Path(__file__).parent.parent


def load_inputs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reward_inputs", GOLDEN / "reward_inputs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


inputs = load_inputs()


def noise(B: int, size: int = 16) -> torch.Tensor:
    return torch.stack([torch.from_numpy(inputs.hash_u8((3, size, size), i)) for i in range(B)])


# ---- the vector file ----

SECTIONS = {
    "jpeg": "used",
    "geneval": "used",
    "ocr": "used: test_rewards_ocr.py, test_rewards_judge.py",
    "legacy": "used in test_rewards_clip.py",
    "hps": "used in test_rewards_clip.py",
    "fill_rule": "the words for fill_state of reward_inputs.py",
    "prompts": "equal to PROMPTS of reward_inputs.py",
    "tiny_clip": "equal to TINY_CLIP of reward_inputs.py",
}
GENEVAL_SECTIONS = {
    "cases": "used",
    "relative_position": "used",
    "fuzz_equal": "a count of random cases, no numbers to compare; test_geneval_equals_the_oracle",
    "compute_iou_plus1": "only used when overlaps are suppressed, which the benchmark does not do",
    "colour_templates": "used in test_rewards_clip.py",
    "palette_stub": "used in test_rewards_clip.py",
    "object_names": "used in test_rewards_clip.py",
}


def test_every_section_of_the_vectors_is_used_or_says_why_not():
    assert set(VECTORS) == set(SECTIONS)
    assert VECTORS["prompts"] == inputs.PROMPTS
    assert VECTORS["tiny_clip"] == inputs.TINY_CLIP
    assert set(VECTORS["geneval"]) == set(GENEVAL_SECTIONS)
    assert set(VECTORS["ocr"]) == {"ocr", "ocr_bad_prompts", "unifiedreward_parse_flow_grpo"}
    assert set(VECTORS["jpeg"]) == {"pillow", "libjpeg_turbo", "note", "float_case", "rows"}


# ---- JPEG ----


@pytest.mark.parametrize("row", VECTORS["jpeg"]["rows"], ids=lambda r: f"{r['image']}-{r['size']}")
def test_jpeg_vectors(row):
    image = torch.from_numpy(inputs.test_image(row["image"], row["size"])).permute(2, 0, 1)
    assert jpeg_kilobytes(image) == row["bytes"] / 1000 == row["ddpo_incompressibility_kb"]

    def score(name: str, **opts: float) -> float:
        return make_reward(name, **opts)(image[None], [""]).item()

    f32 = np.float32
    assert score("jpeg_incompressibility") == f32(row["ddpo_incompressibility_kb"])
    assert score("jpeg_compressibility") == f32(row["ddpo_compressibility"])
    assert score("jpeg_compressibility", scale=500) == f32(row["flow_grpo_compressibility"])
    assert score("jpeg_incompressibility", scale=500) == f32(-row["flow_grpo_compressibility"])


def test_jpeg_rounds_floats_to_the_nearest_level():
    levels = torch.from_numpy(inputs.test_image("sine", 64)).permute(2, 0, 1)[None]
    shifted = (levels.float() / 255 + 0.3 / 255).clamp(0, 1)
    assert torch.equal(to_uint8(shifted), levels)
    kb = make_reward("jpeg_incompressibility")(shifted, [""]).item()
    assert kb == np.float32(VECTORS["jpeg"]["float_case"]["kb"])
    lowered = (levels.float() / 255 - 0.3 / 255).clamp(0, 1)  # truncation would lose a level
    assert torch.equal(to_uint8(lowered), levels)


def test_jpeg_of_images_that_are_not_square():
    image = noise(1)[0]
    wide = torch.cat([image, image], dim=2)  # (3, 16, 32)
    tall = wide.transpose(1, 2)
    assert jpeg_kilobytes(wide) > jpeg_kilobytes(image)
    assert abs(jpeg_kilobytes(wide) - jpeg_kilobytes(tall)) < 0.2


@pytest.mark.parametrize("scale", [0, -1, math.nan, math.inf, "500"])
def test_jpeg_refuses_a_bad_scale(scale):
    with pytest.raises(ValueError, match="scale must be a finite number > 0"):
        make_reward("jpeg_compressibility", scale=scale)


# ---- GenEval: the rule ----


def detections_of(case: dict) -> list[Detection]:
    return [
        Detection(d["class"], d["score"], tuple(d["box"]), d.get("color", ""))
        for d in case["detections"]
    ]


@pytest.mark.parametrize("case", VECTORS["geneval"]["cases"], ids=lambda c: c["name"])
def test_geneval_vectors(case):
    meta = case["metadata"]
    check_metadata(meta)
    score = geneval_score(detections_of(case), meta)
    assert score.benchmark is case["benchmark_correct"]
    assert score.soft == case["flow_grpo_score"]
    assert score.strict is case["flow_grpo_strict"]
    for tag, value in case["group_strict"].items():  # -10 says: another task
        assert value == (float(score.strict) if tag == meta["tag"] else -10)


@pytest.mark.parametrize("case", VECTORS["geneval"]["cases"], ids=lambda c: c["name"])
def test_geneval_rewards_give_the_vectors_too(case):
    def detector(images, metas):
        return [detections_of(case)] * len(images)

    call = (noise(2), ["", ""], [case["metadata"]] * 2)
    hard = make_reward("geneval", detector=detector)(*call)
    soft = make_reward("geneval_soft", detector=detector)(*call)
    assert hard.tolist() == [case["benchmark_correct"]] * 2
    assert torch.equal(soft, torch.tensor([case["flow_grpo_score"]] * 2))


@pytest.mark.parametrize("row", VECTORS["geneval"]["relative_position"], ids=lambda r: str(r["a"]))
def test_relative_position_vectors(row):
    assert sorted(relative_position(tuple(row["a"]), tuple(row["b"]))) == row["relations"]


whole = st.integers(-60, 60)
boxes = st.tuples(whole, whole, whole, whole)


@given(boxes, boxes)
@settings(deadline=None)
def test_relative_position_in_exact_arithmetic(a, b):
    """A relation holds where the gap beyond the margin exceeds half the distance: 4 gap² > d²."""
    shift = [Fraction(a[k] + a[k + 2] - b[k] - b[k + 2], 2) for k in (0, 1)]
    gap = []
    for k in (0, 1):
        margin = Fraction(abs(a[k + 2] - a[k]) + abs(b[k + 2] - b[k]), 10)
        gap.append(abs(shift[k]) - margin)
    distance2 = shift[0] ** 2 + shift[1] ** 2
    assume(
        all(4 * g * g != distance2 for g in gap)
    )  # on the line itself floats may fall either way
    wanted = set()
    for k, (negative, positive) in enumerate([("left of", "right of"), ("above", "below")]):
        if gap[k] > 0 and 4 * gap[k] * gap[k] > distance2:
            wanted.add(negative if shift[k] < 0 else positive)
    assert relative_position(a, b) == wanted


@given(boxes, boxes, whole, whole)
@settings(deadline=None)
def test_relative_position_mirrors_and_moves(a, b, x, y):
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    there = relative_position(a, b)
    assert relative_position(b, a) == {opposite[r] for r in there}
    moved = [(q[0] + x, q[1] + y, q[2] + x, q[3] + y) for q in (a, b)]
    assert relative_position(*moved) == there
    transposed = [(q[1], q[0], q[3], q[2]) for q in (a, b)]
    turn = {"left of": "above", "right of": "below", "above": "left of", "below": "right of"}
    assert relative_position(*transposed) == {turn[r] for r in there}


def test_relative_position_ignores_less_than_a_thousandth_of_a_pixel():
    point = (0.0, 0.0, 0.0, 0.0)
    assert relative_position((0.0009, 0.0, 0.0009, 0.0), point) == set()
    assert relative_position((0.0011, 0.0, 0.0011, 0.0), point) == {"right of"}


def dog(score: float = 0.95, x: float = 0, color: str = "red", label: str = "dog") -> Detection:
    return Detection(label, score, (x, 40.0, x + 10, 50.0), color)


def want(count: int = 1, label: str = "dog", tag: str = "single_object", **clause) -> dict:
    return {"tag": tag, "include": [{"class": label, "count": count, **clause}]}


@pytest.mark.parametrize(
    ("tag", "threshold"), [("counting", 0.9), ("single_object", 0.3), ("colors", 0.3)]
)
def test_a_detection_must_be_above_the_threshold_of_its_task(tag, threshold):
    meta = want(tag=tag)
    assert not geneval_score([dog(threshold)], meta).benchmark
    assert geneval_score([dog(math.nextafter(threshold, 1))], meta).benchmark


def test_at_most_sixteen_objects_of_a_class_count_and_the_best_are_kept():
    many = [dog(0.5 + i / 100, x=20 * i, color="red" if i >= 4 else "blue") for i in range(20)]
    assert geneval_score(many, want(16, color="red")) == (True, 1.0, True)
    assert geneval_score(many, want(17)) == (False, 1 - 1 / 17, False)
    assert geneval_score(many, want(20)).soft == 1 - 4 / 20
    other = [dog(x=20 * i, label="cat") for i in range(16)]
    assert geneval_score(many + other, want(16)).strict  # the limit holds per class
    limited = {**want(1), "exclude": [{"class": "dog", "count": 17}]}
    assert geneval_score(many, limited).benchmark


def test_overlapping_boxes_are_all_counted():
    assert geneval_score([dog(), dog()], want(2)) == (True, 1.0, True)


def test_the_benchmark_looks_at_the_best_boxes_whatever_their_order():
    red, blue = dog(0.9, color="red"), dog(0.8, x=30, color="blue")
    for order in ([red, blue], [blue, red]):
        assert geneval_score(order, want(color="red")).benchmark
        assert not geneval_score(order, want(color="blue")).benchmark


def test_exclude_counts_for_the_benchmark_and_not_for_flow_grpo():
    meta = {**want(1), "exclude": [{"class": "cat", "count": 2}]}
    cat = dog(label="cat", x=50)
    assert geneval_score([dog(), cat], meta) == (True, 1.0, True)
    assert geneval_score([dog(), cat, cat], meta) == (False, 1.0, True)


def test_a_wrong_count_adds_one_zero_even_with_colour_and_position():
    meta = {
        "tag": "position",
        "include": [
            {"class": "dog", "count": 1},
            {"class": "cat", "count": 1, "color": "red", "position": ["left of", 0]},
        ],
    }
    assert geneval_score([dog()], meta).soft == (1 + 0 + 0) / 3


def test_a_wrong_colour_fails_the_group_that_a_position_refers_to():
    meta = {
        "tag": "position",
        "include": [
            {"class": "dog", "count": 1, "color": "blue"},
            {"class": "cat", "count": 1, "position": ["right of", 0]},
        ],
    }
    cat = dog(label="cat", x=50)
    # dog: 1, colour 0; cat: 1, no target 0
    assert geneval_score([dog(color="red"), cat], meta) == (False, 0.5, False)
    assert geneval_score([dog(color="blue"), cat], meta) == (True, 1.0, True)


def test_every_found_box_is_compared_with_every_target():
    meta = {
        "tag": "position",
        "include": [
            {"class": "dog", "count": 2},
            {"class": "cat", "count": 2, "position": ["right of", 0]},
        ],
    }
    dogs = [dog(x=0), dog(x=20)]
    ok = [dog(label="cat", x=60), dog(label="cat", x=80)]
    assert geneval_score(dogs + ok, meta) == (True, 1.0, True)
    for wrong in ([ok[0], dog(label="cat", x=10)], [dog(label="cat", x=10), ok[0]]):
        # one zero for the first wrong pair, then the one that is added in any case
        assert geneval_score(dogs + wrong, meta) == (False, (1 + 1 + 0 + 1) / 4, False)


def test_a_position_refers_to_the_clause_of_its_index():
    meta = {
        "tag": "position",
        "include": [
            {"class": "dog", "count": 1},
            {"class": "cat", "count": 1},
            {"class": "cow", "count": 1, "position": ["right of", 1]},
        ],
    }
    dog_, cat, cow = dog(x=80), dog(x=0, label="cat"), dog(x=40, label="cow")
    assert geneval_score([dog_, cat, cow], meta) == (True, 1.0, True)
    meta["include"][2]["position"] = ["right of", 0]
    assert geneval_score([dog_, cat, cow], meta) == (False, (1 + 1 + 1 + 0 + 1) / 5, False)


def test_clip_bounds_the_cost_of_extra_objects():
    five = [dog(x=20 * i) for i in range(5)]
    assert geneval_score(five, want(1)).soft == -3
    assert geneval_score(five, want(1), clip=True) == (True, 0.0, False)
    assert geneval_score(five, want(3), clip=True).soft == 1 - 2 / 3
    reward = make_reward("geneval_soft", detector=lambda images, metas: [five], clip=True)
    assert reward(noise(1), [""], [want(1)]).item() == 0


def test_the_two_rewards_share_what_one_detector_finds(monkeypatch):
    from tiny.world import ShapeDetector

    looked, original = [], ShapeDetector.__call__
    monkeypatch.setattr(
        ShapeDetector, "__call__", lambda self, x, m: looked.append((self, len(x))) or original(self, x, m)
    )  # fmt: skip
    image, (meta,) = ShapeDetector().self_test_case()
    images = image.expand(20, -1, -1, -1).clone()
    images[3] = images[3].flip(-1)  # another picture
    hard, soft = make_reward("geneval"), make_reward("geneval_soft")
    metas = [meta] * 20
    values = hard(images, [""] * 20, metas), soft(images, [""] * 20, metas)
    assert [n for _, n in looked] == [16, 4]
    assert len({id(detector) for detector, _ in looked}) == 1
    for i in (0, 3, 19):
        (found,) = original(ShapeDetector(), images[i : i + 1], [meta])
        score = geneval_score(found, meta)
        assert (values[0][i], values[1][i]) == (score.benchmark, score.soft)
    hard(images[:16].flip(0), [""] * 16, metas[:16])  # in another order
    hard(images[:16], [""] * 16, [{**meta, "prompt": "x"}] * 16)  # of other prompts
    assert [n for _, n in looked] == [16, 4, 16, 16]


def test_a_shared_detector_forgets_what_is_old_and_goes_with_its_rewards():
    calls = []
    detector = rewards.SharedDetector(lambda images, metas: calls.append(1) or [[]] * len(images))
    pictures = [noise(1, 8 + i) for i in range(detector.keep + 1)]
    for image in (*pictures, *pictures[1:]):
        assert detector(image, [want(1)]) == [[]]
    assert len(calls) == len(pictures)
    detector(pictures[0], [want(1)])
    assert len(calls) == len(pictures) + 1
    before = set(rewards._shared)
    hard = make_reward("geneval", device="cpu")
    assert rewards._shared
    del hard
    gc.collect()
    assert set(rewards._shared) <= before


# A second derivation: clauses as recursive predicates over the scene, terms listed by situation.


def oracle(detections, meta):
    threshold = Fraction("0.9") if meta["tag"] == "counting" else Fraction("0.3")
    clauses = meta["include"]

    def seen(label):
        good = [d for d in detections if d.label == label and d.score > float(threshold)]
        return sorted(good, key=lambda d: d.score, reverse=True)[:16]

    def group(i, exact):
        objects = seen(clauses[i]["class"])
        return objects if exact else objects[: clauses[i]["count"]]

    def counted(i, exact):
        return len(group(i, exact)) == clauses[i]["count"]

    def coloured(i, exact):
        return all(d.color == clauses[i].get("color", d.color) for d in group(i, exact))

    def pairs(i, exact):
        relation, j = clauses[i]["position"]
        return [
            relation in relative_position(a.box, b.box)
            for a in group(i, exact)
            for b in group(j, exact)
        ]

    def matched(i, exact):
        if not (counted(i, exact) and coloured(i, exact)):
            return False
        if "position" not in clauses[i]:
            return True
        return matched(clauses[i]["position"][1], exact) and all(pairs(i, exact))

    def terms(i):
        clause, n = clauses[i], len(group(i, True))
        out = [1 - Fraction(abs(clause["count"] - n), clause["count"])]
        if not counted(i, True):
            return out + [0] * bool({"color", "position"} & set(clause))
        if "color" in clause:
            right = [d.color for d in group(i, True)].count(clause["color"])
            out.append(Fraction(right, clause["count"]))
        if "position" in clause and coloured(i, True):
            if not matched(clause["position"][1], True):
                out.append(0)
            else:
                out += [1] if all(pairs(i, True)) else [0, 1]
        return out

    indices = range(len(clauses))
    extra = any(len(seen(c["class"])) >= c["count"] for c in meta.get("exclude", []))
    every = [t for i in indices for t in terms(i)]
    return (
        all(matched(i, False) for i in indices) and not extra,
        Fraction(sum(every), len(every)),
        all(matched(i, True) for i in indices),
    )


labels = st.sampled_from(["dog", "cat"])
colors = st.sampled_from(["red", "blue"])
counts = st.integers(1, 3)
corner = st.integers(0, 60)


@st.composite
def scenes(draw):
    n = draw(st.integers(0, 7))
    order = draw(st.permutations(range(n)))
    detections = []
    for i in range(n):  # scores differ, so that the best boxes are defined
        x, y = draw(corner), draw(corner)
        box = (x, y, x + draw(st.integers(4, 20)), y + draw(st.integers(4, 20)))
        low = draw(st.sampled_from([0.2, 0.31, 0.88, 0.91]))
        detections.append(Detection(draw(labels), low + order[i] / 1000, box, draw(colors)))
    include = []
    for i in range(draw(st.integers(1, 3))):
        clause = {"class": draw(labels), "count": draw(counts)}
        if draw(st.booleans()):
            clause["color"] = draw(colors)
        if i and draw(st.booleans()):
            relation = draw(st.sampled_from(rewards.RELATIONS))
            clause["position"] = [relation, draw(st.integers(0, i - 1))]
        include.append(clause)
    meta = {"tag": draw(st.sampled_from(["counting", "position"])), "include": include}
    if draw(st.booleans()):
        meta["exclude"] = [{"class": draw(labels), "count": draw(counts)}]
    return detections, meta


@given(scenes())
@settings(deadline=None, max_examples=300)
def test_geneval_equals_the_oracle(scene):
    detections, meta = scene
    check_metadata(meta)
    score, (benchmark, soft, strict) = geneval_score(detections, meta), oracle(detections, meta)
    assert (score.benchmark, score.strict) == (benchmark, strict)
    assert score.soft == pytest.approx(float(soft), abs=1e-12)


@given(scenes())
@settings(deadline=None)
def test_geneval_properties(scene):
    detections, meta = scene
    score, clipped = geneval_score(detections, meta), geneval_score(detections, meta, clip=True)
    assert geneval_score(detections[::-1], meta) == score
    assert 0 <= clipped.soft <= 1
    assert clipped.soft >= score.soft
    assert clipped[::2] == score[::2]  # clip concerns the soft score alone
    if score.strict:
        assert score.soft == 1
        without = {k: v for k, v in meta.items() if k != "exclude"}
        assert geneval_score(detections, without).benchmark
    if score.soft == 1:
        assert score.strict


# ---- GenEval: metadata ----

GOOD = {
    "tag": "position",
    "include": [
        {"class": "dog", "count": 1},
        {"class": "cat", "count": 2, "color": "red", "position": ["left of", 0]},
    ],
    "exclude": [{"class": "cat", "count": 3}],
    "prompt": "two red cats left of a dog",
    "note": "other top-level fields are free",
}


def change(path: str, value: object) -> dict:
    """GOOD with one field replaced, or removed when the value is `...`."""
    meta = json.loads(json.dumps(GOOD))
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    place = meta
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return meta


def test_good_metadata_passes():
    check_metadata(GOOD)
    check_metadata(change("exclude", ...))
    check_metadata(change("exclude", []))


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("tag", ..., "'tag'"),
        ("tag", "", "'tag'"),
        ("tag", 3, "'tag'"),
        ("include", ..., "'include'"),
        ("include", [], "'include'"),
        ("include", {"class": "dog"}, "'include'"),
        ("exclude", None, "'exclude'"),
        ("include.0", "dog", r"'include\[0\]'"),
        ("include.0.class", ..., r"'include\[0\].class'"),
        ("include.0.class", "", r"'include\[0\].class'"),
        ("include.1.count", ..., r"'include\[1\].count'"),
        ("include.1.count", 0, r"'include\[1\].count'"),
        ("include.1.count", 2.0, r"'include\[1\].count'"),
        ("include.1.count", True, r"'include\[1\].count'"),
        ("include.1.color", None, r"'include\[1\].color'"),
        ("include.1.colour", "red", r"'include\[1\].colour'"),
        ("include.1.position", "left of", r"'include\[1\].position'"),
        ("include.1.position", ["left of"], r"'include\[1\].position'"),
        ("include.1.position", ["left", 0], r"'include\[1\].position'"),
        ("include.1.position", [["left of"], 0], r"'include\[1\].position'"),
        ("include.1.position", ["left of", 1], r"'include\[1\].position'"),
        ("include.1.position", ["left of", -1], r"'include\[1\].position'"),
        ("include.1.position", ["left of", False], r"'include\[1\].position'"),
        ("include.0.position", ["left of", 0], r"'include\[0\].position'"),
        ("exclude.0.count", "3", r"'exclude\[0\].count'"),
        ("exclude.0.color", "red", r"'exclude\[0\].color'"),
    ],
)
def test_bad_metadata_names_the_field(path, value, field):
    with pytest.raises(ValueError, match=field) as caught:
        check_metadata(change(path, value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("meta", [None, "dog", [GOOD], 3])
def test_metadata_must_be_a_dict(meta):
    with pytest.raises(ValueError, match="must be a dict"):
        check_metadata(meta)


# ---- The contract ----


def corner_detector(images: torch.Tensor, metas: list[dict]) -> list[list[Detection]]:
    """As many dogs as the first pixel says, modulo 5: it depends on the image alone."""
    return [[dog(x=20 * k) for k in range(int(image[0, 0, 0]) % 5)] for image in images]


MAKERS = {
    "jpeg_compressibility": lambda **o: make_reward("jpeg_compressibility", **o),
    "jpeg_incompressibility": lambda **o: make_reward("jpeg_incompressibility", **o),
    "geneval": lambda **o: make_reward("geneval", detector=corner_detector, **o),
    "geneval_soft": lambda **o: make_reward("geneval_soft", detector=corner_detector, **o),
}
each_reward = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
METAS = [want(1 + i % 3) for i in range(17)]


def score_noise(make, B: int = 17, **opts) -> torch.Tensor:
    return make(**opts)(noise(B), ["a dog"] * B, METAS[:B])


ELSEWHERE = {  # the file that holds these rewards to the contract
    "test_rewards_clip.py": {"aesthetic", "clipscore", "hpsv2", "imagereward", "pickscore"},
    "test_rewards_judge.py": {"llava_bertscore", "unifiedreward", "vlm_yesno"},
    "test_rewards_ocr.py": {"ocr"},
}


def test_every_reward_is_held_to_the_contract():
    assert set(REWARDS) == set(MAKERS).union(*ELSEWHERE.values())
    for file, names in ELSEWHERE.items():
        source = (Path(__file__).parent / file).read_text()
        assert all(f'"{name}"' in source for name in names)


@each_reward
def test_the_batch_changes_nothing(make):
    images, whole_batch = noise(17), score_noise(make)
    assert whole_batch.isfinite().all()
    assert len(whole_batch.unique()) > 1
    for batch_size in (1, 5, 17, 100):
        assert torch.equal(score_noise(make, batch_size=batch_size), whole_batch)
    order = [(5 * i + 3) % 17 for i in range(17)]
    permuted = make()(images[order], ["a dog"] * 17, [METAS[i] for i in order])
    assert torch.equal(permuted, whole_batch[order])
    alone = [make()(images[i : i + 1], ["a dog"], METAS[i : i + 1]) for i in range(17)]
    assert torch.equal(torch.cat(alone), whole_batch)


@each_reward
def test_a_batch_is_never_larger_than_batch_size(make):
    seen = []
    reward = make(batch_size=5)
    inner = reward._score
    reward._score = lambda images, *rest: seen.append(len(images)) or inner(images, *rest)
    reward(noise(17), ["a dog"] * 17, METAS)
    assert seen == [5, 5, 5, 2]


@each_reward
def test_uint8_and_every_float_dtype_agree(make):
    B, wanted = 8, score_noise(make, 8)
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(make()(noise(B).to(dtype) / 255, [""] * B, METAS[:B]), wanted)
    for dtype in (torch.float16, torch.bfloat16):
        half = noise(B).to(dtype) / 255
        rounded = to_uint8(half.float())  # what remains of the levels, in fp32 arithmetic
        assert torch.equal(make()(half, [""] * B, METAS[:B]), make()(rounded, [""] * B, METAS[:B]))


def test_half_precision_is_quantised_in_fp32():
    grid = torch.linspace(0, 1, 4001)  # in fp16 or bf16 the product would round to another level
    for dtype in (torch.float16, torch.bfloat16):
        values = grid.to(dtype)
        assert to_uint8(values).tolist() == [math.floor(v * 255 + 0.5) for v in values.tolist()]


@each_reward
def test_the_result_has_no_gradient_and_can_be_used_in_a_loss(make):
    images = (noise(4) / 255).requires_grad_()
    values = make()(images, [""] * 4, METAS[:4])
    assert values.dtype == torch.float32
    assert values.shape == (4,)
    assert not values.requires_grad
    weight = torch.ones(4, requires_grad=True)
    (weight * values).sum().backward()
    assert torch.equal(weight.grad, values)


@each_reward
def test_the_inputs_are_left_alone(make):
    images, metas = noise(4), json.loads(json.dumps(METAS[:4]))
    make()(images, [""] * 4, metas)
    assert torch.equal(images, noise(4))
    assert metas == METAS[:4]


@each_reward
def test_an_empty_batch_gives_an_empty_result(make):
    assert make()(torch.zeros(0, 3, 8, 8), [], []).shape == (0,)


@each_reward
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_pixels_that_are_not_finite_fail_their_sample_alone(make, bad, caplog):
    images = noise(5) / 255
    images[2, 1, 3, 3] = bad
    values, wanted = make()(images, [""] * 5, METAS[:5]), score_noise(make, 5)
    assert values.isnan().tolist() == [False, False, True, False, False]
    assert torch.equal(values[[0, 1, 3, 4]], wanted[[0, 1, 3, 4]])
    assert len(caplog.records) == 1
    assert "1 of 5 samples not scored (NaN); sample 2: non-finite pixels" in caplog.text


@each_reward
def test_nothing_is_logged_when_all_is_well(make, caplog):
    caplog.set_level(logging.DEBUG)
    score_noise(make)
    assert not caplog.records


@each_reward
@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((2, 3, 8, 8)), "got ndarray"),
        (torch.zeros(3, 8, 8), r"got shape \(3, 8, 8\)"),
        (torch.zeros(2, 8, 8, 3), r"got shape \(2, 8, 8, 3\)"),
        (torch.zeros(2, 4, 8, 8), r"got shape \(2, 4, 8, 8\)"),
        (torch.zeros(2, 3, 0, 8), r"got shape \(2, 3, 0, 8\)"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.int64), "got dtype torch.int64"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.bool), "got dtype torch.bool"),
        (torch.full((2, 3, 8, 8), -0.5), r"got values in \[-0.5, -0.5\]"),
        (torch.full((2, 3, 8, 8), 255.0), r"got values in \[255, 255\]"),
        (torch.full((2, 3, 8, 8), 1.01, dtype=torch.float16), r"got values in \[1.01, 1.01\]"),
    ],
)
def test_bad_images_are_refused(make, images, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()(images, ["", ""], METAS[:2])
    assert "\n" not in str(caught.value)


@each_reward
def test_bad_lengths_are_refused(make):
    reward, images = make(), noise(2)
    with pytest.raises(ValueError, match="prompts has 3 entries for 2 images"):
        reward(images, ["", "", ""], METAS[:2])
    with pytest.raises(ValueError, match="metadata has 1 entries for 2 images"):
        reward(images, ["", ""], METAS[:1])
    with pytest.raises(ValueError, match="prompts must be a list"):
        reward(images, "ab", METAS[:2])
    with pytest.raises(ValueError, match="metadata must be a list"):
        reward(images, ["", ""], METAS[0])


def test_arguments_may_be_given_by_name():
    values = MAKERS["geneval"]()(images=noise(2), prompts=["", ""], metadata=METAS[:2])
    assert values.shape == (2,)


def test_geneval_needs_metadata_and_jpeg_does_not():
    for name in ("geneval", "geneval_soft"):
        with pytest.raises(ValueError, match=f"reward '{name}' needs metadata"):
            MAKERS[name]()(noise(2), ["", ""])
    assert MAKERS["jpeg_compressibility"]()(noise(2), ["", ""]).isfinite().all()


@pytest.mark.parametrize("bad", [{}, None, {**METAS[1], "include": [{"class": "dog"}]}])
def test_bad_metadata_fails_its_sample_alone(bad, caplog):
    metas = [METAS[0], bad, *METAS[2:5]]
    for name in ("geneval", "geneval_soft"):
        values, wanted = MAKERS[name]()(noise(5), [""] * 5, metas), score_noise(MAKERS[name], 5)
        assert values.isnan().tolist() == [False, True, False, False, False]
        assert torch.equal(values[[0, 2, 3, 4]], wanted[[0, 2, 3, 4]])
    assert len(caplog.records) == 2
    assert "sample 1: metadata" in caplog.text


def test_a_detector_that_fails_on_one_image_fails_that_sample_alone(caplog):
    def detector(images, metas):
        if any(int(image[0, 0, 0]) == 7 for image in images):
            raise OSError("cannot\nread")
        return corner_detector(images, metas)

    images = noise(9)
    images[4, 0, 0, 0] = 7
    others = [i for i in range(9) if i != 4]
    for batch_size in (1, 2, 9):
        reward = make_reward("geneval_soft", detector=detector, batch_size=batch_size)
        values = reward(images, [""] * 9, METAS[:9])
        assert values.isnan().nonzero().flatten().tolist() == [4]
        assert torch.equal(values[others], score_noise(MAKERS["geneval_soft"], 9)[others])
    assert len(caplog.records) == 3
    message = caplog.records[0].getMessage()
    assert message == (
        "reward 'geneval_soft': 1 of 9 samples not scored (NaN); sample 4: OSError: cannot read"
    )


@pytest.mark.parametrize(
    "broken",
    [
        Detection("dog", math.nan, (0, 0, 1, 1), ""),
        Detection("dog", 0.9, (0, 0, math.inf, 1), ""),
        ("dog", 0.9),
    ],
)
def test_a_broken_detection_fails_its_sample(broken):
    def detector(images, metas):
        return [[broken] if int(image[0, 0, 0]) == 7 else [dog()] for image in images]

    images = noise(3)
    images[:, 0, 0, 0] = torch.tensor([0, 7, 0])
    values = make_reward("geneval", detector=detector)(images, [""] * 3, [want(1)] * 3)
    assert values.isnan().tolist() == [False, True, False]
    assert values[[0, 2]].tolist() == [1, 1]


def test_a_detector_that_returns_too_little_scores_nothing(caplog):
    reward = make_reward("geneval", detector=lambda images, metas: [])
    assert reward(noise(3), [""] * 3, METAS[:3]).isnan().all()
    assert "3 of 3 samples" in caplog.text
    assert "the detector returned 0 lists for 1 images" in caplog.text


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300, None])
def test_a_score_that_is_not_a_finite_number_is_nan(bad, caplog):
    def score(images, prompts, metas):
        return [bad if prompt == "bad" else 1 for prompt in prompts]

    values = Reward(score)(noise(3), ["", "bad", ""])
    assert values.isnan().tolist() == [False, True, False]
    assert len(caplog.records) == 1


def test_a_wrong_number_of_scores_is_a_failure(caplog):
    assert Reward(lambda images, prompts, metas: [1.0] * 2)(noise(3), [""] * 3).isnan().all()
    assert "2 scores for 1 images" in caplog.text


def test_the_warning_counts_the_failures_and_shows_the_first(caplog):
    values = Reward(lambda images, prompts, metas: map(int, prompts))(noise(3), ["a", "1", "b"])
    assert values.isnan().tolist() == [True, False, True]
    assert len(caplog.records) == 1
    assert "2 of 3 samples not scored (NaN); sample 0: ValueError: " in caplog.text
    assert "'a'" in caplog.text


def test_scoring_builds_no_graph():
    grads = []
    score = Reward(lambda images, prompts, metas: grads.append(torch.is_grad_enabled()) or [1.0])
    score((noise(1) / 255).requires_grad_(), [""])
    assert grads == [False]


def test_an_unavailable_reward_is_not_swallowed():
    def score(images, prompts, metas):
        raise RewardUnavailable("the server is gone")

    with pytest.raises(RewardUnavailable, match="the server is gone"):
        Reward(score)(noise(2), ["", ""])
    assert issubclass(RewardUnavailable, RuntimeError)


# ---- make_reward ----


def test_an_unknown_reward_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown reward 'geneva'; known rewards:") as caught:
        make_reward("geneva")
    assert all(name in str(caught.value) for name in REWARDS)
    assert "\n" not in str(caught.value)


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(ValueError, match="reward 'geneval_soft' has no option 'clipp'"):
        make_reward("geneval_soft", clipp=True)
    with pytest.raises(ValueError, match="has no option 'detector'; its options: scale"):
        make_reward("jpeg_compressibility", detector="shapes")


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, None])
def test_a_bad_batch_size_is_refused(batch_size):
    with pytest.raises(ValueError, match="batch_size must be an integer >= 1"):
        make_reward("jpeg_compressibility", batch_size=batch_size)


@pytest.mark.parametrize("detector", ["yolo", None, 3])
def test_an_unknown_detector_lists_the_known_ones(detector):
    with pytest.raises(ValueError, match="known detectors: shapes"):
        make_reward("geneval", detector=detector)


def test_name_and_kind():
    for name, make in MAKERS.items():
        assert (make().name, make().kind) == (name, "cpu")


@pytest.mark.parametrize(
    ("name", "module", "remedy"),
    [
        ("jpeg_compressibility", "PIL", "pip install pillow"),
        ("geneval", "tiny.world", "tiny/world.py"),
    ],
)
def test_a_missing_module_is_one_line_with_the_remedy(name, module, remedy, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, f"{module}.Image", None)
    with pytest.raises(RewardUnavailable, match=remedy) as caught:
        make_reward(name)
    assert "\n" not in str(caught.value)


def test_import_loads_nothing_that_a_reward_may_not_need():
    script = (
        "import sys, torch; before = set(sys.modules); import rewards; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(out.stdout.split()) <= {"rewards", *sys.stdlib_module_names}


# ---- self_test ----


class FakeDetector:
    def __init__(self, found: list[Detection]) -> None:
        self.found = found

    def __call__(self, images: torch.Tensor, metas: list[dict]) -> list[list[Detection]]:
        return [self.found] * len(images)

    def self_test_case(self) -> tuple[torch.Tensor, list[dict]]:
        return noise(2), [want(1), want(1, color="red")]


@pytest.mark.parametrize("name", ["geneval", "geneval_soft"])
def test_self_test_passes_with_a_detector_that_sees(name):
    make_reward(name, detector=FakeDetector([dog()])).self_test()


@pytest.mark.parametrize(
    "found", [[], [dog(color="blue")], [Detection("dog", math.nan, (0, 0, 1, 1), "")]]
)
def test_self_test_refuses_a_detector_that_does_not(found):
    reward = make_reward("geneval", detector=FakeDetector(found))
    with pytest.raises(RuntimeError, match="reward 'geneval' fails its self-test") as caught:
        reward.self_test()
    assert "\n" not in str(caught.value)


def test_self_test_needs_at_least_one_picture():
    detector = FakeDetector([dog()])
    detector.self_test_case = lambda: (torch.zeros(0, 3, 8, 8, dtype=torch.uint8), [])
    with pytest.raises(RuntimeError, match="fails its self-test"):
        make_reward("geneval", detector=detector).self_test()


@each_reward
def test_self_test_without_a_known_answer_does_nothing(make):
    make().self_test()


# ---- Prompt files ----


def write(tmp_path: Path, name: str, text: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_text_prompts(tmp_path):
    path = write(tmp_path, "a.txt", "a dog\n\n  a cat \r\n \na dog")
    wanted = [{"prompt": "a dog"}, {"prompt": "a cat"}, {"prompt": "a dog"}]
    assert read_prompts(path) == read_prompts(str(path)) == wanted


def test_jsonl_prompts(tmp_path):
    rows = [GOOD, {"prompt": "only\u2028text"}]
    text = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n"
    assert read_prompts(write(tmp_path, "a.jsonl", text)) == rows
    assert read_prompts(write(tmp_path, "b.jsonl", b"\xef\xbb\xbf" + text.encode())) == rows


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.txt", "", "a.txt: no prompts in this file"),
        ("a.txt", " \n\n", "a.txt: no prompts in this file"),
        ("a.jsonl", "\n", "a.jsonl: no prompts in this file"),
        ("a.csv", "a dog", r"a.csv: a prompt file must end in .txt or .jsonl"),
        ("a.txt", b"a \xff dog", "a.txt: cannot read prompts: not UTF-8"),
        ("a.jsonl", '{"prompt": "x"}\n\n{"prompt": ', "a.jsonl, line 3: not valid JSON"),
        ("a.jsonl", '{"prompt": "x"}\n["x"]', "a.jsonl, line 2: not a JSON object"),
        ("a.jsonl", '{"tag": "colors"}', "a.jsonl, line 1: 'prompt' is missing"),
        ("a.jsonl", '{"prompt": " "}', "a.jsonl, line 1: 'prompt' is missing"),
        ("a.jsonl", '{"prompt": ["x"]}', "a.jsonl, line 1: 'prompt' is missing"),
        ("a.jsonl", '{"prompt": "x", "tag": "colors"}', "line 1: metadata field 'include'"),
        ("a.jsonl", json.dumps(change("include.1.count", 0)), r"line 1: .*'include\[1\].count'"),
    ],
)
def test_bad_prompt_files_are_refused_in_one_line(tmp_path, name, text, reason):
    path = write(tmp_path, name, text)
    with pytest.raises(ValueError, match=reason) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_prompt_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="cannot read prompts: No such file or directory"):
        read_prompts(tmp_path / "none.txt")
    folder = tmp_path / "folder.txt"
    folder.mkdir()
    with pytest.raises(ValueError, match="cannot read prompts: Is a directory"):
        read_prompts(folder)
