"""Rewards: score images with one callable each, loaded only when asked for.

    reward = make_reward("geneval_soft", clip=True)
    values = reward(images, prompts, metadata)      # (B,) float32, native scale, NaN = not scored

Nothing is rescaled, clipped or averaged here beyond what the source of a reward does itself. This
file imports torch and the standard library; what else a reward needs, its factory imports.
"""

import base64
import inspect
import io
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

Metadata = Mapping[str, Any]  # one prompt in GenEval's JSONL format
# uint8 (B, 3, H, W), B prompts, B metadata -> B scores; an exception in place of a score fails
# that sample alone
Scorer = Callable[[Tensor, Sequence[str], Sequence[Metadata]], Iterable[float | Exception]]

log = logging.getLogger("rewards")


class RewardUnavailable(RuntimeError):
    """A package, file or server that a reward needs is missing; one line with the remedy."""


# --------------------------------------------------------------------------------------------------
# The contract: what every reward accepts and returns
# --------------------------------------------------------------------------------------------------


def to_uint8(images: Tensor) -> Tensor:
    """round(255 x) in fp32 for any float dtype in [0, 1]; uint8 passes (ddpo-pytorch@1958463)."""
    if images.dtype == torch.uint8:
        return images
    return (images.float() * 255).round().clamp(0, 255).to(torch.uint8)


class Reward:
    """(images (B, 3, H, W), prompts, metadata=None) -> (B,) float32 on the images' device, no grad.

    images: float in [0, 1] of any float dtype, or uint8; a broken contract is a ValueError. A
    sample that cannot be scored (non-finite pixels or score, a prompt or metadata that the reward
    cannot use, an exception) is NaN, with one warning a call; the others keep their score. kind:
    "cpu", "gpu" (on `device`), "http".
    """

    def __init__(
        self,
        score: Scorer,
        kind: str = "cpu",
        device: str | torch.device = "cpu",
        check: Callable[[Any], None] | None = None,
        check_prompt: Callable[[str], object] | None = None,
        self_test_case: Callable[[], tuple[Tensor, Sequence[Metadata]]] | None = None,
    ) -> None:
        self.name = "reward"
        self.kind = kind
        self.batch_size = 16
        self._score, self._check, self._check_prompt = score, check, check_prompt
        self._self_test_case = self_test_case
        self._device = device if kind == "gpu" else "cpu"

    @torch.no_grad()
    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None
    ) -> Tensor:
        _check_images(images)
        B = len(images)
        _check_length("prompts", prompts, B)
        if metadata is None and self._check is not None:
            raise ValueError(f"reward {self.name!r} needs metadata: one GenEval dict per image")
        metas = [{}] * B if metadata is None else metadata
        _check_length("metadata", metas, B)

        errors = self._unusable(images, prompts, metas)  # sample index -> reason
        usable = [i for i in range(B) if i not in errors]
        values = torch.full((B,), math.nan)
        for start in range(0, len(usable), self.batch_size):
            self._score_into(
                values, errors, usable[start : start + self.batch_size], images, prompts, metas
            )
        if errors:
            first = min(errors)
            log.warning(
                f"reward {self.name!r}: {len(errors)} of {B} samples not scored (NaN); "
                f"sample {first}: {errors[first]}"
            )
        return values.to(images.device)

    def _unusable(
        self, images: Tensor, prompts: Sequence[str], metas: Sequence[Metadata]
    ) -> dict[int, str]:
        errors = {}
        finite = images.isfinite().flatten(1).all(1).tolist()
        for i, (prompt, meta) in enumerate(zip(prompts, metas, strict=True)):
            if not finite[i]:
                errors[i] = "non-finite pixels"
                continue
            try:
                self._check_sample(prompt, meta)
            except ValueError as error:
                errors[i] = str(error)
        return errors

    def _score_into(
        self,
        values: Tensor,
        errors: dict[int, str],
        chosen: list[int],
        images: Tensor,
        prompts: Sequence[str],
        metas: Sequence[Metadata],
    ) -> None:
        """Score the chosen samples; when a batch raises, each of its samples is tried alone."""
        batch = to_uint8(images[chosen]).to(self._device)
        try:
            scores = list(
                self._score(batch, [prompts[i] for i in chosen], [metas[i] for i in chosen])
            )
            if len(scores) != len(chosen):
                raise ValueError(f"{len(scores)} scores for {len(chosen)} images")
            values_or_nan = [math.nan if isinstance(s, Exception) else float(s) for s in scores]
            rounded = torch.tensor(values_or_nan)
        except RewardUnavailable:
            raise
        except Exception as error:
            if len(chosen) == 1:
                errors[chosen[0]] = _one_line(error)
                return
            for i in chosen:
                self._score_into(values, errors, [i], images, prompts, metas)
            return
        for i, score, value in zip(chosen, scores, rounded, strict=True):
            if value.isfinite():
                values[i] = value
            elif isinstance(score, Exception):
                errors[i] = _one_line(score)
            else:
                errors[i] = f"the score is {value.item()}"

    def check(self, row: Metadata) -> None:
        """ValueError unless a prompt, row["prompt"], and its metadata suit this reward."""
        self._check_sample(row.get("prompt", ""), row)

    def _check_sample(self, prompt: str, meta: Metadata) -> None:
        if self._check_prompt is not None:
            self._check_prompt(prompt)
        if self._check is not None:
            self._check(meta)

    def self_test(self) -> None:
        """Score pictures whose answer is known, if any: RuntimeError unless every score is 1."""
        if self._self_test_case is None:
            return
        images, metas = self._self_test_case()
        scores = self(images, [str(meta.get("prompt", "")) for meta in metas], metas).tolist()
        if not scores or any(score != 1 for score in scores):
            raise RuntimeError(
                f"reward {self.name!r} fails its self-test: scores {scores} where all must be 1"
            )


def _check_images(images: Tensor) -> None:
    wanted = "images must be a (B, 3, H, W) tensor, float in [0, 1] or uint8"
    if not isinstance(images, Tensor):
        raise ValueError(f"{wanted}, got {type(images).__name__}")
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape[2:]:
        raise ValueError(f"{wanted}, got shape {tuple(images.shape)}")
    if images.dtype == torch.uint8:
        return
    if not images.is_floating_point():
        raise ValueError(f"{wanted}, got dtype {images.dtype}")
    finite = images[images.isfinite()].float()
    if finite.numel() and (finite.min() < 0 or finite.max() > 1):
        raise ValueError(f"{wanted}, got values in [{finite.min():.4g}, {finite.max():.4g}]")


def _check_length(what: str, values: object, B: int) -> None:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(f"{what} must be a list, one entry per image, got {type(values).__name__}")
    if len(values) != B:
        raise ValueError(f"{what} has {len(values)} entries for {B} images")


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


# --------------------------------------------------------------------------------------------------
# Names
# --------------------------------------------------------------------------------------------------

Factory = Callable[..., Reward]  # (device, dtype, **options) -> Reward
REWARDS: dict[str, Factory] = {}


def register(name: str) -> Callable[[Factory], Factory]:
    """Decorator: file a factory under a name of REWARDS."""
    return lambda factory: REWARDS.setdefault(name, factory)


def make_reward(
    name: str,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    batch_size: int = 16,
    **opts: Any,
) -> Reward:
    """Load a reward; ValueError: bad name or option, RewardUnavailable: a missing dependency.

    device and dtype are where and how its network runs (rewards without one ignore them);
    batch_size is the most images scored at once and never changes a score.
    """
    if name not in REWARDS:
        raise ValueError(f"unknown reward {name!r}; known rewards: {', '.join(sorted(REWARDS))}")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be an integer >= 1, got {batch_size!r}")
    known = [
        option
        for option in inspect.signature(REWARDS[name]).parameters
        if option not in ("device", "dtype")
    ]
    for option in opts:
        if option not in known:
            raise ValueError(
                f"reward {name!r} has no option {option!r}; its options: {', '.join(known)}"
            )
    reward = REWARDS[name](device=device, dtype=dtype, **opts)
    reward.name, reward.batch_size = name, batch_size
    return reward


# --------------------------------------------------------------------------------------------------
# JPEG size
# --------------------------------------------------------------------------------------------------


def jpeg_bytes(image: Tensor) -> bytes:
    """A uint8 (3, H, W) image as JPEG of quality 95."""
    from PIL import Image

    buffer = io.BytesIO()
    pixels = image.permute(1, 2, 0).contiguous().numpy()  # (H, W, 3)
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=95)
    return buffer.getvalue()


def jpeg_kilobytes(image: Tensor) -> float:
    """kB (1000 bytes) of a uint8 (3, H, W) image as JPEG (ddpo-pytorch@1958463)."""
    return len(jpeg_bytes(image)) / 1000


def _jpeg(sign: int, scale: float) -> Reward:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise RewardUnavailable("JPEG rewards need Pillow: pip install pillow") from error
    if not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ValueError(f"scale must be a finite number > 0, got {scale!r}")
    return Reward(
        lambda images, prompts, metas: [sign * jpeg_kilobytes(image) / scale for image in images]
    )


@register("jpeg_compressibility")
def _(device: object, dtype: object, scale: float = 1) -> Reward:
    """-kB / scale; ddpo-pytorch has scale 1, flow_grpo@ac4c86e 500."""
    return _jpeg(-1, scale)


@register("jpeg_incompressibility")
def _(device: object, dtype: object, scale: float = 1) -> Reward:
    """kB / scale."""
    return _jpeg(1, scale)


# --------------------------------------------------------------------------------------------------
# GenEval: the rule (pure functions), then the two rewards
# --------------------------------------------------------------------------------------------------

Box = tuple[float, float, float, float]  # x0, y0, x1, y1; y grows downwards
RELATIONS = ("left of", "right of", "above", "below")


class Detection(NamedTuple):
    """One object found in an image."""

    label: str
    score: float
    box: Box
    color: str


# uint8 (B, 3, H, W) and the metadata of B prompts -> B lists of detections
Detector = Callable[[Tensor, Sequence[Metadata]], Sequence[Sequence[Detection]]]


class GenevalScore(NamedTuple):
    """benchmark: GenEval's rule; soft, strict: Flow-GRPO's training reward, exact-count rule."""

    benchmark: bool
    soft: float
    strict: bool


def relative_position(box_a: Box, box_b: Box) -> set[str]:
    """Where A is, seen from B (geneval@af4902f).

    Offset of the centres, less 0.1 (size A + size B) on each axis, over the length of the whole
    offset; a relation holds beyond 0.5, so none, one or two of RELATIONS are returned.
    """
    offset, reduced = [], []
    for low, high in ((0, 2), (1, 3)):
        size = abs(box_a[high] - box_a[low]) + abs(box_b[high] - box_b[low])
        shift = (box_a[low] + box_a[high]) / 2 - (box_b[low] + box_b[high]) / 2
        offset.append(shift)
        reduced.append(math.copysign(max(abs(shift) - 0.1 * size, 0), shift))
    if max(abs(reduced[0]), abs(reduced[1])) < 1e-3:
        return set()
    dx, dy = (r / math.hypot(*offset) for r in reduced)
    holds = (dx < -0.5, dx > 0.5, dy < -0.5, dy > 0.5)
    return {relation for relation, true in zip(RELATIONS, holds, strict=True) if true}


def geneval_score(
    detections: Sequence[Detection], metadata: Metadata, clip: bool = False
) -> GenevalScore:
    """Score the detections of one image; metadata as check_metadata accepts it.

    Benchmark: evaluate_images.py, geneval@af4902f. Soft, strict: gen_eval.py, reward-server@7131478
    (Flow-GRPO), quirks included: both ignore `exclude`, and 16 objects where 1 is wanted give a
    soft score of -14 unless `clip` holds every term at 0 or above.
    """
    found = _confident(detections, metadata["tag"])
    benchmark, _ = _check_include(found, metadata["include"], best_only=True, clip=clip)
    for clause in metadata.get("exclude", ()):
        benchmark &= len(found.get(clause["class"], ())) < clause["count"]
    strict, terms = _check_include(found, metadata["include"], best_only=False, clip=clip)
    return GenevalScore(benchmark, sum(terms) / len(terms), strict)


def _confident(detections: Sequence[Detection], tag: str) -> dict[str, list[Detection]]:
    """Per label the detections above the threshold, best first, at most 16; overlaps stay."""
    threshold = 0.9 if tag == "counting" else 0.3
    found: dict[str, list[Detection]] = {}
    for detection in sorted(map(Detection._make, detections), key=lambda d: -d.score):
        if not all(map(math.isfinite, (detection.score, *detection.box))):
            raise ValueError(f"detection with a non-finite score or box: {tuple(detection)}")
        if detection.score > threshold:
            found.setdefault(detection.label, []).append(detection)
    return {label: objects[:16] for label, objects in found.items()}


def _check_include(
    found: Mapping[str, Sequence[Detection]],
    include: Sequence[Metadata],
    best_only: bool,
    clip: bool,
) -> tuple[bool, list[float]]:
    """Check the clauses in order: do all hold, and Flow-GRPO's terms.

    best_only looks at the `count` best objects of a class (more may be there), else at all of them.
    """
    terms: list[float] = []
    groups: list[Sequence[Detection] | None] = []  # objects of each clause, None where it failed
    for clause in include:
        count = clause["count"]
        objects = found.get(clause["class"], ())
        objects = objects[:count] if best_only else objects
        term = 1 - abs(count - len(objects)) / count
        terms.append(max(term, 0.0) if clip else term)
        matched = len(objects) == count
        if not matched and ("color" in clause or "position" in clause):
            terms.append(0.0)  # official: one zero, even for a clause with both
        if matched and "color" in clause:
            right = sum(d.color == clause["color"] for d in objects)
            terms.append(1 - abs(count - right) / count)
            matched = right == count
        if matched and "position" in clause:
            relation, target = clause["position"]
            others = groups[target]
            matched = others is not None and all(
                relation in relative_position(d.box, other.box) for d in objects for other in others
            )
            if not matched:
                terms.append(0.0)
            if others is not None:
                terms.append(1.0)  # official: added in any case, so a wrong relation costs half
        groups.append(objects if matched else None)
    return None not in groups, terms


def check_metadata(meta: Any) -> None:
    """Raise ValueError, naming the field, unless meta is a prompt in GenEval's JSONL format.

    {"tag": str, "include": [{"class": str, "count": int >= 1, "color": str, "position": [relation,
    index of an earlier clause]}, ...], "exclude": [{"class", "count"}, ...]}; color, position and
    exclude may be absent, other top-level fields are free.
    """
    _require(isinstance(meta, Mapping), "", "must be a dict", meta)
    tag = meta.get("tag")
    _require(isinstance(tag, str) and tag != "", "tag", "must be a non-empty string", tag)
    include, exclude = meta.get("include"), meta.get("exclude", [])
    _require(_is_list(include) and len(include) > 0, "include", "must be a non-empty list", include)
    _require(_is_list(exclude), "exclude", "must be a list", exclude)
    for i, clause in enumerate(include):
        _check_clause(clause, f"include[{i}]", ("class", "count", "color", "position"))
        if "color" in clause:
            _require(
                isinstance(clause["color"], str),
                f"include[{i}].color",
                "must be a string",
                clause["color"],
            )
        if "position" in clause:
            position = clause["position"]
            _require(
                _is_list(position)
                and len(position) == 2
                and position[0] in RELATIONS
                and _is_int(position[1])
                and 0 <= position[1] < i,
                f"include[{i}].position",
                f"must be [one of {', '.join(RELATIONS)}; index of an earlier clause]",
                position,
            )
    for i, clause in enumerate(exclude):
        _check_clause(clause, f"exclude[{i}]", ("class", "count"))


def _check_clause(clause: Any, where: str, fields: Sequence[str]) -> None:
    _require(isinstance(clause, Mapping), where, "must be a dict", clause)
    label, count = clause.get("class"), clause.get("count")
    _require(
        isinstance(label, str) and label != "",
        f"{where}.class",
        "must be a non-empty string",
        label,
    )
    _require(_is_int(count) and count >= 1, f"{where}.count", "must be an integer >= 1", count)
    for field in clause:
        _require(
            field in fields, f"{where}.{field}", f"is not one of {', '.join(fields)}", clause[field]
        )


def _require(holds: bool, field: str, rule: str, value: object) -> None:
    if not holds:
        raise ValueError(f"metadata{f' field {field!r}' if field else ''} {rule}, got {value!r}")


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _make_detector(detector: str | Detector) -> Detector:
    if callable(detector):
        return detector
    if detector != "shapes":
        raise ValueError(f"unknown detector {detector!r}; known detectors: shapes, or a callable")
    try:
        from tiny.world import ShapeDetector
    except ImportError as error:
        raise RewardUnavailable(
            "detector 'shapes' needs tiny/world.py beside rewards.py, and scipy: pip install scipy"
            f" ({error})"
        ) from error
    return cast(Detector, ShapeDetector())


def _geneval(detector: str | Detector, pick: Callable[[GenevalScore], float], clip: bool) -> Reward:
    detect = _make_detector(detector)

    def score(images: Tensor, prompts: Sequence[str], metas: Sequence[Metadata]) -> list[float]:
        detections = detect(images, metas)
        if len(detections) != len(metas):
            raise ValueError(
                f"the detector returned {len(detections)} lists for {len(metas)} images"
            )
        return [pick(geneval_score(d, m, clip)) for d, m in zip(detections, metas, strict=True)]

    return Reward(
        score, check=check_metadata, self_test_case=getattr(detect, "self_test_case", None)
    )


@register("geneval")
def _(device: object, dtype: object, detector: str | Detector = "shapes") -> Reward:
    """GenEval's benchmark rule, 0 or 1 (arXiv 2310.11513)."""
    return _geneval(detector, lambda score: score.benchmark, clip=False)


@register("geneval_soft")
def _(
    device: object, dtype: object, detector: str | Detector = "shapes", clip: bool = False
) -> Reward:
    """Flow-GRPO's training reward (arXiv 2505.05470); clip=True keeps it in [0, 1]."""
    return _geneval(detector, lambda score: score.soft, clip)


# --------------------------------------------------------------------------------------------------
# OCR: the text that a prompt asks for
# --------------------------------------------------------------------------------------------------

# (least shortest side of a picture, shortest side that the text detector enlarges it to): small
# pictures gain nothing from more, and at 512 px glyphs that fill the picture are lost below 736
OCR_SIDES = ((512, 736), (128, 320), (1, 192))


def ocr_target(prompt: str) -> str:
    """The first span in straight double quotes, without spaces, lower case; ValueError if none."""
    parts = prompt.split('"')
    target = parts[1].replace(" ", "").lower() if len(parts) > 2 else ""
    if not target:
        raise ValueError('no text in straight double quotes, as in: a sign that says "OPEN"')
    return target


def levenshtein(a: str, b: str) -> int:
    """Least number of insertions, deletions and replacements of a character that make b of a."""
    row = list(range(len(b) + 1))  # distances from the part of a read so far to each start of b
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def ocr_score(lines: Iterable[tuple[str, float]], prompt: str) -> float:
    """1 - distance / length of the target, in [0, 1]; 1 if the target occurs anywhere in the text.

    lines: (text, confidence) in the order of the detector; those of confidence 0 do not count
    (ocr.py, flow_grpo@ac4c86e). ValueError for a prompt without a target.
    """
    target = ocr_target(prompt)
    text = "".join(line for line, confidence in lines if confidence > 0)
    text = text.replace(" ", "").lower()
    distance = 0 if target in text else min(levenshtein(text, target), len(target))
    return 1 - distance / len(target)


def _ocr_self_test_case() -> tuple[Tensor, list[Metadata]]:
    from PIL import Image, ImageDraw, ImageFont
    from torchvision.transforms.v2.functional import pil_to_tensor

    picture = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(picture).text((4, 18), "OPEN", "black", ImageFont.load_default(20))
    return pil_to_tensor(picture)[None], [{"prompt": 'a sign that says "OPEN"'}]


@register("ocr")
def _(device: object, dtype: object, workers: int = 4) -> Reward:
    """Share of the quoted text that is read in the picture, 0 to 1 (arXiv 2505.05470).

    # differs: RapidOCR (PP-OCRv6) reads, not PaddleOCR 2.9; it is given BGR, as it expects
    (official: RGB); a prompt without quoted text and an engine that fails give NaN (official: 0).
    """
    _check_count("workers", workers)
    try:
        import onnxruntime  # noqa: F401
        from rapidocr import RapidOCR
    except ImportError as error:
        raise RewardUnavailable(
            "reward 'ocr' needs rapidocr and onnxruntime: pip install rapidocr onnxruntime"
        ) from error
    case = _ocr_self_test_case()
    engines: dict[int, Any] = {}
    for _, side in OCR_SIDES:
        engines[side] = RapidOCR(
            params={
                "Global.log_level": "critical",
                "Det.limit_type": "min",
                "Det.limit_side_len": side,
                "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            }
        )
        engines[side](_bgr(case[0])[0], use_cls=False)  # its networks load with the first picture
    pool = ThreadPoolExecutor(workers)

    def score(images: Tensor, prompts: Sequence[str], metas: Sequence[Metadata]) -> list[float]:
        smallest = min(images.shape[2:])
        engine = engines[next(side for least, side in OCR_SIDES if smallest >= least)]

        def read(pixels: Any, prompt: str) -> float:
            found = engine(pixels, use_cls=False)
            read_any = getattr(found, "txts", None)  # None or no such field where nothing is read
            return ocr_score(zip(found.txts, found.scores, strict=True) if read_any else (), prompt)

        return list(pool.map(read, _bgr(images), prompts))

    return Reward(score, check_prompt=ocr_target, self_test_case=lambda: case)


def _bgr(images: Tensor) -> Any:
    """uint8 (B, 3, H, W) -> numpy (B, H, W, 3), blue first."""
    return images.flip(1).permute(0, 2, 3, 1).contiguous().numpy()


def _check_count(option: str, value: object) -> None:
    if not _is_int(value) or cast(int, value) < 1:
        raise ValueError(f"{option} must be an integer >= 1, got {value!r}")


def _check_positive(option: str, value: object) -> None:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{option} must be a finite number > 0, got {value!r}")


# --------------------------------------------------------------------------------------------------
# A vision language model as judge, over HTTP
# --------------------------------------------------------------------------------------------------

Choice = Mapping[str, Any]  # the one entry of "choices" in the answer to a chat completion


class Judge:
    """Client of a vision language model behind an OpenAI-compatible API (vLLM, sglang, ...).

    url: with or without /v1, else the environment variable REWARD_<NAME>_URL, else `default`;
    model: else the first one that the server lists. Asks `workers` questions at a time (at most the
    batch_size of the reward), each up to `tries` times; a try fails when the server is silent for
    `timeout` seconds. RewardUnavailable, naming the command `serve`, unless it answers now.
    """

    def __init__(
        self,
        name: str,
        default: str,
        serve: str,
        url: str | None,
        model: str | None,
        workers: int,
        tries: int,
        timeout: float,
    ) -> None:
        _check_count("workers", workers)
        _check_count("tries", tries)
        _check_positive("timeout", timeout)
        try:
            import PIL.Image  # noqa: F401
            import requests  # noqa: F401
        except ImportError as error:
            raise RewardUnavailable(
                f"reward {name!r} needs requests and Pillow: pip install requests pillow"
            ) from error
        variable = f"REWARD_{name.upper()}_URL"
        root = (url or os.environ.get(variable) or default).rstrip("/").removesuffix("/v1")
        self.url = f"{root}/v1"
        self._tries, self._timeout = tries, timeout
        self._pool = ThreadPoolExecutor(workers)
        try:
            served = [str(entry["id"]) for entry in self._request("GET", "/models")["data"]]
            self.model = model or served[0]
        except Exception as error:  # no server, or something else that answers there
            raise RewardUnavailable(
                f"reward {name!r}: no OpenAI-compatible server at {self.url} "
                f"({_one_line(error)[:200]}); start one, `{serve}`, or give url=, or set {variable}"
            ) from error
        if self.model not in served:
            raise RewardUnavailable(
                f"reward {name!r}: no model {self.model!r} at {self.url}; model= may be "
                f"{', '.join(served)}"
            )

    def ask(
        self,
        images: Tensor,
        questions: Sequence[str],
        read: Callable[[Choice], Any],
        **settings: Any,
    ) -> list[Any]:
        """read(answer) for each uint8 picture of (B, 3, H, W) and its question, in this order.

        A picture whose question fails gets the exception in its place. settings: of the completion,
        max_tokens for one.
        """

        def one(image: Tensor, question: str) -> Any:
            try:
                return read(self._complete(image, question, settings))
            except Exception as error:  # the server's fault or the model's: this sample's alone
                return error

        return list(self._pool.map(one, images, questions))

    def _complete(self, image: Tensor, question: str, settings: Mapping[str, Any]) -> Choice:
        url = "data:image/jpeg;base64," + base64.b64encode(jpeg_bytes(image)).decode()
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": question},
        ]
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            **settings,
        }
        for attempt in range(self._tries - 1):
            try:
                return self._choice(body)
            except Exception:
                time.sleep(2**attempt / 2)
        return self._choice(body)

    def _choice(self, body: Mapping[str, Any]) -> Choice:
        answer = self._request("POST", "/chat/completions", json=body)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != 1:
            raise ValueError(f"not one choice in the answer {_short(answer)}")
        return cast(Choice, choices[0])

    def _request(self, method: str, path: str, **options: Any) -> Any:
        import requests

        response = requests.request(method, self.url + path, timeout=self._timeout, **options)
        if response.status_code != 200:
            raise ValueError(f"HTTP {response.status_code}: {response.text[:100]}")
        return response.json()


def _short(answer: object) -> str:
    return json.dumps(answer)[:100]


def _text_of(choice: Choice) -> str:
    try:
        text = choice["message"]["content"]
    except (KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise ValueError(f"no text in the answer {_short(choice)}")
    return text


# official: the pointwise prompt of CodeGoat24/UnifiedReward (MIT), as flow_grpo@ac4c86e shortens it
UNIFIED_QUESTION = (
    "<image>\nYou are given a text caption and a generated image based on that caption. Your task "
    "is to evaluate this image based on two key criteria:\n1. Alignment with the Caption: Assess "
    "how well this image aligns with the provided caption. Consider the accuracy of depicted "
    "objects, their relationships, and attributes as described in the caption.\n2. Overall Image "
    "Quality: Examine the visual quality of this image, including clarity, detail preservation, "
    "color accuracy, and overall aesthetic appeal.\nBased on the above criteria, assign a score "
    "from 1 to 5 after 'Final Score:'.\nYour task is provided as follows:\n"
    "Text Caption: [{prompt}]"
)
FINAL_SCORE = re.compile(
    r"final\s+score[\s*_`]*(?:\(1-5\))?[\s*_`]*:[\s*_`]*(\d+(?:\.\d+)?)(?![^\W_]|[.,]\d)",
    re.IGNORECASE,
)
YESNO_QUESTION = 'Does this figure show "{prompt}"? Please answer yes or no.'  # 2404.01291
LLAVA_QUESTION = "Answer concisely: what is going on in this image?"  # ddpo-pytorch@1958463
VLLM = "vllm serve Qwen/Qwen2.5-VL-7B-Instruct"


def parse_final_score(text: str) -> float:
    """The first number after "Final Score:", in markdown or not; ValueError outside 1..5.

    # differs: official code reads "10" as 1, and "**4**" and "final score: 4" as 0.
    """
    match = FINAL_SCORE.search(text)
    if match is None or not 1 <= float(match[1]) <= 5:
        raise ValueError(f"no final score in 1..5 in the answer {text[-100:]!r}")
    return float(match[1])


def yes_probability(choice: Choice) -> float:
    """P(yes) / (P(yes) + P(no)) of the first token, in any case (Flow-Factory@a0b2bc5).

    From the likeliest tokens that the answer lists; ValueError if neither is among them.
    """
    weight = {"yes": 0.0, "no": 0.0}
    try:
        for token in choice["logprobs"]["content"][0]["top_logprobs"]:
            word = token["token"].strip().lower()
            if word in weight:
                weight[word] += math.exp(token["logprob"])
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"no top_logprobs in the answer {_short(choice)}") from None
    total = sum(weight.values())
    if total == 0:
        raise ValueError(f"neither yes nor no among the likeliest tokens: {_short(choice)}")
    return weight["yes"] / total


@register("unifiedreward")
def _(
    device: object,
    dtype: object,
    url: str | None = None,
    model: str | None = None,
    scale: float = 5,
    workers: int = 16,
    tries: int = 3,
    timeout: float = 60,
) -> Reward:
    """UnifiedReward's score of 1 to 5 (arXiv 2503.05236) / scale, as flow_grpo@ac4c86e.

    # differs: the picture goes as JPEG in its own size (official: as PNG of 512 px); an answer
    without a score is NaN (official: 0, below the worst score).
    """
    _check_positive("scale", scale)
    serve = (
        "python -m sglang.launch_server --model-path CodeGoat24/UnifiedReward-7b-v1.5 "
        "--chat-template chatml-llava --port 17140"
    )
    default = "http://127.0.0.1:17140"
    judge = Judge("unifiedreward", default, serve, url, model, workers, tries, timeout)

    def score(images: Tensor, prompts: Sequence[str], metas: Sequence[Metadata]) -> list[Any]:
        questions = [UNIFIED_QUESTION.replace("{prompt}", prompt) for prompt in prompts]

        def read(choice: Choice) -> float:
            return parse_final_score(_text_of(choice)) / scale

        return judge.ask(images, questions, read, max_tokens=1024)

    return Reward(score, kind="http")


@register("vlm_yesno")
def _(
    device: object,
    dtype: object,
    url: str | None = None,
    model: str | None = None,
    question: str = YESNO_QUESTION,
    workers: int = 16,
    tries: int = 3,
    timeout: float = 60,
) -> Reward:
    """Probability, 0 to 1, that any vision language model answers yes (VQAScore, arXiv 2404.01291).

    question: {prompt} in it stands for the prompt.
    """
    default = "http://127.0.0.1:8000"
    judge = Judge("vlm_yesno", default, VLLM, url, model, workers, tries, timeout)

    def score(images: Tensor, prompts: Sequence[str], metas: Sequence[Metadata]) -> list[Any]:
        questions = [question.replace("{prompt}", prompt) for prompt in prompts]
        return judge.ask(
            images, questions, yes_probability, max_tokens=1, logprobs=True, top_logprobs=20
        )

    return Reward(score, kind="http")


class BertRecall:
    """BERTScore's recall (arXiv 1904.09675) by a network of transformers, cut after `layer`.

    Without idf weights and baseline, as bert-score 0.3.13 computes it by default. path: a folder,
    else the environment variable REWARD_LLAVA_BERTSCORE_PATH, else the hub.
    """

    def __init__(
        self, path: str | None, device: str | torch.device, dtype: torch.dtype, layer: int
    ) -> None:
        _check_count("layer", layer)
        hub_id, variable = "microsoft/deberta-xlarge-mnli", "REWARD_LLAVA_BERTSCORE_PATH"
        source = path or os.environ.get(variable) or hub_id
        try:
            from transformers import AutoModel, AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(source, padding_side="right")
            model = AutoModel.from_pretrained(source, dtype=dtype)
        except ImportError as error:
            raise RewardUnavailable(
                "reward 'llava_bertscore' needs transformers: pip install transformers"
            ) from error
        except (OSError, ValueError) as error:
            raise RewardUnavailable(
                f"reward 'llava_bertscore' finds no network in {source!r}: hf download {hub_id} "
                f"(750 M parameters), or give path=, or set {variable} ({_one_line(error)[:100]})"
            ) from error
        layers = model.encoder.layer
        if len(layers) < layer:
            raise ValueError(f"layer must be 1..{len(layers)} for {source}, got {layer}")
        model.encoder.layer = layers[:layer]
        self.model = model.to(device).eval().requires_grad_(False)
        self._device, self._longest = device, model.config.max_position_embeddings

    def __call__(self, candidates: Sequence[str], references: Sequence[str]) -> list[float]:
        """B recalls: how much of each reference its candidate says; 0 for an empty candidate."""
        x, x_mask = self._embed(candidates)  # (B, L, D), (B, L)
        y, y_mask = self._embed(references)
        cosine = torch.einsum("bmd,bld->bml", y, x).masked_fill(~x_mask[:, None], -1)
        inner = y_mask.clone()  # without the two special tokens of the reference
        inner[:, 0] = False
        inner[torch.arange(len(inner)), y_mask.sum(1) - 1] = False
        recall = (cosine.amax(2) * inner).sum(1) / inner.sum(1)
        return recall.where(x_mask.sum(1) > 2, 0).tolist()

    def _embed(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        tokens = self.tokenizer(
            [text.strip() for text in texts],
            padding=True,
            truncation=True,
            max_length=self._longest,
            return_tensors="pt",
        ).to(self._device)
        states = self.model(**tokens).last_hidden_state.float()
        return torch.nn.functional.normalize(states, dim=-1), tokens["attention_mask"].bool()


@register("llava_bertscore")
def _(
    device: str | torch.device,
    dtype: torch.dtype,
    url: str | None = None,
    model: str | None = None,
    path: str | None = None,
    layer: int = 40,
    workers: int = 16,
    tries: int = 3,
    timeout: float = 60,
) -> Reward:
    """DDPO's prompt alignment (arXiv 2305.13301): how much of the prompt a model's caption says.

    path, layer: the network of BERTScore and its layer. # differs: any vision language model in
    place of the LLaVA of 2023, which cannot be installed today; JPEG quality 95 (official: 80).
    """
    default = "http://127.0.0.1:8000"
    judge = Judge("llava_bertscore", default, VLLM, url, model, workers, tries, timeout)
    recall = BertRecall(path, device, dtype, layer)

    def score(images: Tensor, prompts: Sequence[str], metas: Sequence[Metadata]) -> list[Any]:
        answers = judge.ask(images, [LLAVA_QUESTION] * len(prompts), _text_of, max_tokens=64)
        said = [i for i, answer in enumerate(answers) if isinstance(answer, str)]
        if said:
            references = [f"The image contains {prompts[i]}" for i in said]
            recalls = recall([answers[i] for i in said], references)
            for i, value in zip(said, recalls, strict=True):
                answers[i] = value
        return answers

    return Reward(score, kind="http")


# --------------------------------------------------------------------------------------------------
# Prompt files
# --------------------------------------------------------------------------------------------------


def read_prompts(path: str | Path) -> list[dict[str, Any]]:
    """Read a .txt file (a prompt a line) or .jsonl file (GenEval metadata, or only "prompt").

    Each prompt is a dict: "prompt" and the metadata of its line. Blank lines are skipped. A fault
    is a ValueError in one line: file, line number, reason.
    """
    return [row for _, row in _numbered_prompts(path)]


def _numbered_prompts(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """The prompts of read_prompts with the numbers of their lines."""
    path = Path(path)
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"{path}: a prompt file must end in .txt or .jsonl")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ValueError(f"{path}: cannot read prompts: {reason}") from error
    rows = []
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON may hold U+2028
        if not line.strip():
            continue
        try:
            row = {"prompt": line.strip()} if path.suffix == ".txt" else _parse_row(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        rows.append((number, row))
    if not rows:
        raise ValueError(f"{path}: no prompts in this file")
    return rows


def _parse_row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"not a JSON object: {line.strip()[:60]}")
    if not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
        raise ValueError("'prompt' is missing or not a non-empty string")
    if row.keys() & {"tag", "include", "exclude"}:
        check_metadata(row)
    return row


def read_splits(path: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(train, held-out) prompts: a folder of train.jsonl and heldout.jsonl, or one file."""
    here = Path(__file__).parent / path
    root = here if here.exists() else Path(path)
    files = [root / "train.jsonl", root / "heldout.jsonl"] if root.is_dir() else [root, root]
    try:
        train, heldout = (read_prompts(file) for file in files)
    except ValueError as error:
        raise SystemExit(f"--prompts: {error}") from None
    return train, heldout


def read_stages(curriculum: str | None, resumed: str | None) -> list[tuple[str, dict[str, Any]]]:
    """(file and stage, fields of Args) of every stage of a curriculum, from its copy in the run
    folder `resumed` if there is one; [("", {})] without a curriculum. SystemExit in one line.
    """
    if not curriculum:
        return [("", {})]
    file = Path(resumed, "curriculum.json") if resumed else Path(curriculum)
    try:
        table = json.loads(file.read_text())
        stages = [{**table.get("all", {}), **stage} for stage in table["stages"]]
        if not stages or table.keys() - {"source", "all", "stages"}:
            raise ValueError(f"keys {[*table]}, {len(stages)} stages")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        form = '{"source": "...", "all": {SETTINGS}, "stages": [{"iterations": 10, SETTINGS}, ...]}'
        raise SystemExit(f"--curriculum: {file}: {error!r}; it should hold {form}") from None
    names = [f"stage {n} {stage.pop('name', '')}".strip() for n, stage in enumerate(stages, 1)]
    return [(f"--curriculum: {file}, {name}", stage) for name, stage in zip(names, stages)]


def load_pairs(path: str, stages: Sequence[Any]) -> tuple[list[Any], Any]:
    """Offline preferences: lines of "prompt" and two image files, "winner" and "loser", absolute or
    beside the file -> (the stages of the run with these rows and a reward of 1 or 0, pair_images),
    or one line that names the faulty line and field. Every row is used twice in turn: as the
    winner, then as the loser.
    """
    folder, where = Path(path).parent, f"--pairs: {path}"
    try:
        numbered = _numbered_prompts(path)
    except ValueError as error:
        raise SystemExit(f"--pairs: {error}") from None
    for number, row in numbered:
        for field in ("winner", "loser"):
            value = row.get(field)
            if not isinstance(value, str):
                raise SystemExit(f"{where}, line {number}: {field}: {value!r} is no file name")
            row[field] = folder / value
            if not row[field].is_file():
                raise SystemExit(f"{where}, line {number}: {field}: no file {row[field]}")

    def preferred(images: Tensor, prompts: Sequence[str], rows: Sequence[Metadata]) -> Tensor:
        return (torch.arange(len(images)) + 1) % 2.0

    new = dict(train=[row for _, row in numbered], weights={"preferred": 1.0})
    return [s._replace(**new, rewards={"preferred": preferred}) for s in stages], pair_images


def pair_images(rows: Sequence[Metadata], side: int) -> Tensor:
    """Winners and losers in turn (B, 3, side, side), fp32 in [0, 1]: resized, the middle cut out.
    SystemExit in one line for a file that is no picture.
    """
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms.v2 import functional as F

    images = []
    for i, row in enumerate(rows):
        file = row["loser" if i % 2 else "winner"]
        try:
            image = decode_image(str(file), ImageReadMode.RGB)
        except RuntimeError:
            raise SystemExit(f"--pairs: {file} is no JPEG, PNG, WebP or GIF picture") from None
        image = image[0] if image.dim() == 4 else image  # the first frame of an animation
        image = F.to_dtype(image, torch.float32, scale=True)  # 16 bits a channel too
        images.append(F.center_crop(F.resize(image, [side], antialias=True), [side, side]))
    return torch.stack(images)


def check_name(name: str, flag: str) -> None:
    """SystemExit in one line that names the flag, unless there is a reward of this name."""
    if name not in REWARDS:
        raise SystemExit(f"--{flag}: unknown reward {name!r}; known: {', '.join(REWARDS)}")


def parse_rewards(text: str) -> dict[str, float]:
    """'pickscore:1,hpsv2:0.5' -> weights by name; a bare name weighs 1."""
    out: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition(":")
        check_name(name, "reward")
        try:
            out[name] = float(weight or 1)
        except ValueError:
            raise SystemExit(f"--reward: {part!r} is not NAME or NAME:WEIGHT") from None
    total = sum(map(abs, out.values()))
    if not 0 < total < math.inf:
        raise SystemExit(f"--reward: weights in {text!r} add up to {total}")
    return out


def load_rewards(
    names: Iterable[str | None],
    options: dict[str, dict[str, Any]],
    device: str,
    rows: Sequence[Metadata] = (),
) -> dict[str, Reward]:
    """Load each named reward once, with its options, and let it test itself. SystemExit in one line
    if something it needs is missing, metadata in one of the prompt rows included.
    """
    out = {}
    for name in dict.fromkeys(filter(None, names)):
        try:
            out[name] = make_reward(name, device=device, **options.get(name, {}))
        except RewardUnavailable as error:
            raise SystemExit(f"--reward {name}: {error}") from None
        out[name].self_test()
    check_rows(out, rows)
    return out


def check_rows(rewards: Mapping[str, Reward], rows: Sequence[Metadata]) -> None:
    """SystemExit in one line if a prompt row lacks what one of these rewards needs."""
    for name, reward in rewards.items():
        for row in rows:
            try:
                reward.check(row)
            except ValueError as error:
                why = f"{row['prompt']!r} is no prompt for the reward {name}: {error}"
                raise SystemExit(f"--prompts: {why}") from None


def scorable(
    rewards: Mapping[str, Reward], rows: Sequence[Metadata], required: Iterable[str | None]
) -> dict[str, Reward]:
    """Those of the rewards that can score all these rows; SystemExit if that leaves out a required
    one, or all.
    """
    out = {}
    for name, reward in rewards.items():
        try:
            check_rows({name: reward}, rows)
            out[name] = reward
        except SystemExit:
            if name in required:
                raise
    if not out:
        raise SystemExit("--heldout-reward: none, and --prompts suit no reward of a stage")
    return out


def score(rewards: Mapping[str, Reward], images: Tensor, rows: Sequence[Metadata]) -> Tensor:
    """Rewards (N, B) in native scale, on the CPU; NaN where a sample could not be scored."""
    prompts = [row["prompt"] for row in rows]
    return torch.stack([fn(images, prompts, list(rows)).cpu() for fn in rewards.values()])


def reward_metrics(
    weights: Mapping[str, float], values: Tensor, max_fail: float
) -> dict[str, float]:
    """Means of the rewards (N, B) and the share that failed; SystemExit where that is too large."""
    failed = float((~values.isfinite()).any(0).float().mean())
    if failed > max_fail:
        names = [n for n, v in zip(weights, values) if not v.isfinite().all()]
        raise SystemExit(
            f"--max-fail: {failed:.0%} of the samples of one iteration got no {'+'.join(names)} "
            f"reward, above {max_fail:.0%}; the warnings above say why"
        )
    out = {f"reward/{n}": float(v[v.isfinite()].mean()) for n, v in zip(weights, values)}
    mean = sum(w * out[f"reward/{n}"] for n, w in weights.items())
    return {"reward/mean": mean, **out, "reward/fail_frac": failed}
