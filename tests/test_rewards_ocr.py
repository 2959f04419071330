"""rewards.py: reading the text that a prompt asks for, with the real networks of RapidOCR."""

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont
from test_rewards import VECTORS, noise
from torchvision.transforms.v2.functional import pil_to_tensor

import rewards
from rewards import (
    Reward,
    RewardUnavailable,
    check_rows,
    levenshtein,
    load_rewards,
    make_reward,
    ocr_score,
    ocr_target,
)

ROOT = Path(__file__).parent.parent
installed = all(importlib.util.find_spec(name) for name in ("rapidocr", "onnxruntime"))
reads = pytest.mark.skipif(
    not installed, reason="needs rapidocr and onnxruntime: pip install -r requirements-ocr.txt"
)


def ask(text: str) -> str:
    return f'a sign that says "{text}" at night'


# ---- the rule ----


@pytest.mark.parametrize("case", VECTORS["ocr"]["ocr"], ids=lambda c: c["prompt"])
def test_ocr_vectors(case):
    lines = [tuple(line) for line in case["lines"]]
    assert ocr_score(lines, case["prompt"]) == case["reward"]


@pytest.mark.parametrize("prompt", VECTORS["ocr"]["ocr_bad_prompts"])
def test_prompts_at_which_the_official_code_fails(prompt):
    for call in (ocr_target, lambda prompt: ocr_score([("Hello", 0.9)], prompt)):
        with pytest.raises(ValueError, match="no text in straight double quotes"):
            call(prompt)


@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        ('"Hello World"', "helloworld"),
        ('a "B" and a "C"', "b"),
        ('"½ off\u2019s" ', "½off\u2019s"),
        ('"a\tb\n"', "a\tb\n"),
        ('an open "quote', None),
        ('"  " spaces', None),
        ('"" empty, "B" is not the first', None),
        ("", None),
    ],
)
def test_target(prompt, target):
    if target is None:
        with pytest.raises(ValueError, match="no text in straight double quotes"):
            ocr_target(prompt)
    else:
        assert ocr_target(prompt) == target


def definition(a: str, b: str) -> int:
    """Levenshtein's distance by its recursion."""

    @cache
    def d(i: int, j: int) -> int:
        if 0 in (i, j):
            return i + j
        return min(d(i - 1, j) + 1, d(i, j - 1) + 1, d(i - 1, j - 1) + (a[i - 1] != b[j - 1]))

    return d(len(a), len(b))


letters = st.text("ab c", max_size=8)


@given(letters, letters, letters)
def test_levenshtein(a, b, c):
    assert levenshtein(a, b) == definition(a, b)
    assert levenshtein(a, b) == levenshtein(b, a)
    assert (levenshtein(a, b) == 0) == (a == b)
    assert levenshtein(a, c) <= levenshtein(a, b) + levenshtein(b, c)


lines_read = st.lists(st.tuples(st.text("aAbB ", max_size=6), st.sampled_from([0, 0.6, 1])))


@given(lines_read, st.text("aAbB ", min_size=1, max_size=6).filter(str.strip))
def test_the_score_is_in_0_to_1_and_1_only_for_a_substring(lines, wanted):
    score = ocr_score(lines, ask(wanted))
    assert 0 <= score <= 1
    text = "".join(line for line, confidence in lines if confidence)
    flat = [t.replace(" ", "").lower() for t in (text, wanted)]
    assert (score == 1) == (flat[1] in flat[0])
    around = [("zz", 1), *lines, ("zz", 1)]
    assert (ocr_score(around, ask(wanted)) == 1) == (score == 1)


# ---- the reward ----


def write(text: str, size: int, height: float = 0, color="black", paper="white") -> torch.Tensor:
    """A uint8 picture (3, size, size) with `text` in its middle, of `height` px or 0.9 wide."""
    font = ImageFont.load_default(height or 20)
    if not height:
        font = ImageFont.load_default(20 * 0.9 * size / font.getlength(text))
    picture = Image.new("RGB", (size, size), paper)
    ImageDraw.Draw(picture).text((size / 2, size / 2), text, color, font, anchor="mm")
    return pil_to_tensor(picture)


@pytest.fixture(scope="module")
def ocr() -> Reward:
    return make_reward("ocr")


@reads
@pytest.mark.parametrize("size", [64, 128, 256])
def test_text_of_any_size_is_read(ocr, size):
    words = ["Hi", "STOP", "Hello World"]
    images = torch.stack([write(word, size) for word in words])
    assert ocr(images, [ask(word) for word in words]).tolist() == [1, 1, 1]
    others = [ask(word) for word in ("Xy", "Quick", "zzzzzzzzzz")]
    assert ocr(images, others).max() < 0.5


@reads
def test_short_words_are_read_at_32_pixels_and_large_pictures_too(ocr):
    assert ocr(write("STOP", 32)[None], [ask("STOP")]).item() == 1
    assert ocr(write("Gas Next Exit", 512)[None], [ask("Gas Next Exit")]).item() == 1


@reads
def test_pictures_that_are_not_square(ocr):
    wide = torch.cat([write("left", 64), write("right", 64)], dim=2)
    tall = torch.cat([write("upper", 64), write("lower", 64)], dim=1)
    assert ocr(wide[None], [ask("left right")]).item() == 1
    assert ocr(tall[None], [ask("upper lower")]).item() == 1


@reads
def test_blank_and_noisy_pictures_score_0(ocr):
    blank = torch.stack(
        [torch.full((3, 64, 64), level, dtype=torch.uint8) for level in (0, 128, 255)]
    )
    images = torch.cat([blank, noise(1, 64)])
    assert ocr(images, [ask("Hello")] * 4).tolist() == [0] * 4


@reads
def test_a_wrong_letter_costs_its_share(ocr):
    assert ocr(write("HOUSE", 128)[None], [ask("MOUSE")]).item() == pytest.approx(0.8)


@reads
def test_the_batch_changes_nothing(ocr):
    words = ["Hi", "STOP", "Hello", "World", "Open", "Exit 7", "Gas"]
    images = torch.stack([write(word, 64) for word in words])
    prompts = [ask(word) for word in ("Hi", "SHOP", "Hello", "Word", "Door", "Exit 8", "x")]
    whole = ocr(images, prompts)
    assert len(whole.unique()) > 3
    assert torch.equal(torch.cat([ocr(i[None], [p]) for i, p in zip(images, prompts)]), whole)
    order = [3, 0, 6, 2, 5, 1, 4]
    assert torch.equal(ocr(images[order], [prompts[i] for i in order]), whole[order])
    few = make_reward("ocr", batch_size=2, workers=1)
    assert torch.equal(few(images.float() / 255, prompts), whole)
    assert whole.dtype == torch.float32


@reads
def test_the_engine_gets_blue_first(monkeypatch):
    import rapidocr

    seen = []

    class Engine:
        def __init__(self, params):
            self.params = params

        def __call__(self, pixels, use_cls):
            seen.append((self.params["Det.limit_side_len"], pixels.copy(), use_cls, self.params))

    monkeypatch.setattr(rapidocr, "RapidOCR", Engine)
    reward = make_reward("ocr", workers=1)
    assert [side for side, *_ in seen] == [736, 320, 192]  # each is loaded at the start
    image = torch.zeros(1, 3, 2, 4, dtype=torch.uint8)
    image[0, :, 0, 1] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert reward(image, [ask("A")]).tolist() == [0]  # nothing is read
    side, pixels, use_cls, params = seen[-1]
    assert pixels.shape == (2, 4, 3)
    assert pixels[0, 1].tolist() == [3, 2, 1]
    assert (side, use_cls, params["Det.limit_type"]) == (192, False, "min")
    assert params["EngineConfig.onnxruntime.intra_op_num_threads"] == 1
    sides = []
    for size in (127, 128, 511, 512):
        reward(torch.zeros(1, 3, size, 600, dtype=torch.uint8), [ask("A")])
        sides.append(seen[-1][0])
    assert sides == [192, 320, 320, 736]


@reads
def test_an_engine_that_fails_on_one_picture(ocr, monkeypatch, caplog):
    images = torch.stack([write(word, 64) for word in ("Hi", "STOP", "Exit")])
    prompts = [ask(word) for word in ("Hi", "STOP", "Exit")]

    def broken(lines, prompt):
        if "STOP" in prompt:
            raise OSError("no\nmemory")
        return ocr_score(lines, prompt)

    monkeypatch.setattr(rewards, "ocr_score", broken)
    values = ocr(images, prompts)
    assert values.isnan().tolist() == [False, True, False]
    assert values[[0, 2]].tolist() == [1, 1]
    assert "sample 1: OSError: no memory" in caplog.text


@reads
def test_a_prompt_without_a_target_fails_its_sample_alone(ocr, caplog):
    images = torch.stack([write("Hi", 64)] * 3)
    values = ocr(images, [ask("Hi"), "a “curly” cat", ask("Ho")])
    assert values.isnan().tolist() == [False, True, False]
    assert values[[0, 2]].tolist() == [1, 0.5]
    (record,) = caplog.records
    assert record.getMessage() == (
        "reward 'ocr': 1 of 3 samples not scored (NaN); sample 1: no text in straight double "
        'quotes, as in: a sign that says "OPEN"'
    )


@reads
def test_a_prompt_file_without_targets_is_refused_at_the_start():
    rows = [{"prompt": ask("Hi")}, {"prompt": "a cat"}]
    loaded = load_rewards(["ocr"], {}, "cpu")
    with pytest.raises(SystemExit, match="--prompts: 'a cat' is no prompt for the reward ocr: no"):
        check_rows(loaded, rows)
    check_rows(loaded, rows[:1])


@reads
def test_an_engine_that_reads_nothing_fails_its_self_test(ocr, monkeypatch):
    ocr.self_test()
    monkeypatch.setattr(rewards, "ocr_score", lambda lines, prompt: 0.75)
    with pytest.raises(RuntimeError, match=re.escape("'ocr' fails its self-test: scores [0.75]")):
        ocr.self_test()
    with pytest.raises(SystemExit, match=r"^--reward ocr: reward 'ocr' fails its self-test[^\n]*$"):
        load_rewards(["ocr"], {}, "cpu")


@pytest.mark.parametrize("module", ["rapidocr", "onnxruntime"])
def test_a_missing_package_is_one_line_with_the_remedy(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RewardUnavailable, match="pip install rapidocr onnxruntime") as caught:
        make_reward("ocr")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2.0, True])
def test_a_bad_number_of_workers_is_refused(workers):
    with pytest.raises(ValueError, match="workers must be an integer >= 1"):
        make_reward("ocr", workers=workers)


def test_a_prompt_is_checked_without_its_metadata():
    """Reward.check takes a row of a prompt file; a call may have no metadata at all."""
    reward = Reward(lambda images, prompts, metas: [1.0] * len(prompts), check_prompt=ocr_target)
    reward.check({"prompt": ask("Hi"), "tag": 3})
    with pytest.raises(ValueError, match="no text in straight double quotes"):
        reward.check({"prompt": "a cat"})
    values = reward(noise(2), [ask("Hi"), "a cat"])
    assert values.isnan().tolist() == [False, True]


def test_the_packages_of_ocr_are_installed_wherever_the_tests_are_run():
    """The tests above must run in .ci/run and by the README's command, not be skipped."""
    for file in (".ci/run", "README.md"):
        assert re.search(
            r"pip install .*-r requirements\.txt -r requirements-ocr\.txt",
            (ROOT / file).read_text(),
        )
    named = (ROOT / "requirements-ocr.txt").read_text().split()
    assert [re.match(r"[\w-]+", line)[0] for line in named] == ["rapidocr", "onnxruntime"]
    assert all(re.fullmatch(r"[\w-]+>=[\d.]+,<[\d.]+", line) for line in named)
