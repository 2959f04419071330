"""Rewards: score images with one callable each, loaded only when asked for.

    reward = make_reward("geneval_soft", clip=True)
    values = reward(images, prompts, metadata)      # (B,) float32, native scale, NaN = not scored

Nothing is rescaled, clipped or averaged here beyond what the source of a reward does itself. This
file imports torch and the standard library; what else a reward needs, its factory imports.
"""

import argparse
import base64
import functools
import hashlib
import html
import importlib
import inspect
import io
import json
import logging
import math
import os
import re
import time
import unicodedata
import weakref
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


def _check_positive(option: str, value: object) -> None:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{option} must be a finite number > 0, got {value!r}")


def _jpeg(sign: int, scale: float) -> Reward:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise RewardUnavailable("JPEG rewards need Pillow: pip install pillow") from error
    _check_positive("scale", scale)
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


class SharedDetector:
    """A detector of several rewards: what one of them has found, the others need not look for."""

    keep = 64  # calls

    def __init__(self, detector: Detector) -> None:
        self.detector, self.found = detector, dict[bytes, Sequence[Sequence[Detection]]]()

    def __getattr__(self, name: str) -> Any:  # kind, check, self_test_case
        return getattr(self.detector, name)

    def __call__(self, images: Tensor, metas: Sequence[Metadata]) -> Sequence[Sequence[Detection]]:
        text = repr((images.shape, metas)).encode()
        key = hashlib.blake2b(text + images.cpu().numpy().tobytes()).digest()
        if key not in self.found:
            self.found[key] = self.detector(images, metas)
            if len(self.found) > self.keep:
                del self.found[next(iter(self.found))]
        return self.found[key]


_shared: weakref.WeakValueDictionary[Any, SharedDetector] = weakref.WeakValueDictionary()


def _make_detector(
    detector: str | Detector, path: str | None, clip_path: str | None, device: Any, dtype: Any
) -> Detector:
    if detector != "mask2former" and (path or clip_path):
        raise ValueError("options path and clip_path belong to detector='mask2former'")
    if callable(detector):
        return detector
    key = (detector, path, clip_path, str(device), dtype)
    shared = _shared.get(key) or SharedDetector(_load_detector(*key))
    _shared[key] = shared
    return shared


def _load_detector(
    detector: str, path: str | None, clip_path: str | None, device: Any, dtype: Any
) -> Detector:
    if detector == "mask2former":
        return Mask2FormerDetector(path, clip_path, device, dtype)
    if detector != "shapes":
        raise ValueError(
            f"unknown detector {detector!r}; known detectors: shapes, mask2former, or a callable"
        )
    try:
        from tiny.world import ShapeDetector
    except ImportError as error:
        raise RewardUnavailable(
            "detector 'shapes' needs tiny/world.py beside rewards.py, and scipy: pip install scipy"
            f" ({error})"
        ) from error
    return cast(Detector, ShapeDetector())


def _geneval(
    detect: Detector, pick: Callable[[GenevalScore], float], clip: bool, device: Any
) -> Reward:
    def score(images: Tensor, prompts: Sequence[str], metas: Sequence[Metadata]) -> list[float]:
        detections = detect(images, metas)
        if len(detections) != len(metas):
            raise ValueError(
                f"the detector returned {len(detections)} lists for {len(metas)} images"
            )
        return [pick(geneval_score(d, m, clip)) for d, m in zip(detections, metas, strict=True)]

    return Reward(
        score,
        getattr(detect, "kind", "cpu"),
        device,
        check=getattr(detect, "check", check_metadata),
        self_test_case=getattr(detect, "self_test_case", None),
    )


@register("geneval")
def _(
    device: Any,
    dtype: Any,
    detector: str | Detector = "shapes",
    path: str | None = None,
    clip_path: str | None = None,
) -> Reward:
    """GenEval's benchmark rule, 0 or 1 (arXiv 2310.11513).

    detector: "shapes" (the embedded world), "mask2former" (photographs; path: its folder,
    clip_path: that of the CLIP that names colours; class Mask2FormerDetector), or a callable.
    """
    detect = _make_detector(detector, path, clip_path, device, dtype)
    return _geneval(detect, lambda score: score.benchmark, False, device)


@register("geneval_soft")
def _(
    device: Any,
    dtype: Any,
    detector: str | Detector = "shapes",
    clip: bool = False,
    path: str | None = None,
    clip_path: str | None = None,
) -> Reward:
    """Flow-GRPO's training reward (arXiv 2505.05470); clip=True keeps it in [0, 1]; the detector
    as in `geneval`.
    """
    detect = _make_detector(detector, path, clip_path, device, dtype)
    return _geneval(detect, lambda score: score.soft, clip, device)


# --------------------------------------------------------------------------------------------------
# Checkpoints
# --------------------------------------------------------------------------------------------------

TOKENIZER = ("*.json", "*.txt")  # of a model on the hub: the files that its tokenizer needs,
MODEL = (*TOKENIZER, "*.safetensors")  # and with the weights; the last pattern must match
PICKLED = (*TOKENIZER, "pytorch_model*.bin")  # likewise where the hub has no safetensors


def checkpoint(
    name: str,
    hub_id: str,
    size: str,
    path: str | Path | None = None,
    *,
    option: str = "path",
    files: Sequence[str] = MODEL,
) -> Path:
    """Where a checkpoint of the reward `name` lies: `path`, else the environment variable
    REWARD_<NAME>_<OPTION>, else the hub's cache, else a download of `hub_id`.

    `option` is the keyword that gave `path`, `files` what is needed of the hub: patterns (a folder
    is returned) or one file name (that file; a folder that holds it may be given). Raises
    RewardUnavailable in one line with the remedy.
    """
    one = None if "*" in files[-1] else files[-1]
    variable = f"REWARD_{name}_{option}".upper()
    given = path or os.environ.get(variable)
    if given:
        where = Path(given).expanduser()
        where = where / one if one and where.is_dir() else where
        if where.is_file() if one else where.is_dir():
            return where
        kind = f"file, nor a folder with {one}" if one else "folder"
        source = option if path else f"the environment variable {variable}"
        raise RewardUnavailable(
            f"reward {name!r}: {source} is {str(given)!r}, which is no {kind}; give what"
            f" `{_download(hub_id, files)}` leaves, or nothing"
        )
    hub, failure = _library(name, "huggingface_hub"), Exception()
    for cached in (True, False):  # the cache first: where there is no network, the hub answers late
        try:
            where = Path(
                hub.snapshot_download(hub_id, allow_patterns=list(files), local_files_only=cached)
            )
        except Exception as error:  # not in the cache, no network, no such repository, ...
            failure = error
            continue
        for found in where.glob(files[-1]):
            return found if one else where
        failure = FileNotFoundError(files[-1])
    raise RewardUnavailable(
        f"reward {name!r} needs {hub_id} ({size}): `{_download(hub_id, files)}`, or give"
        f" {option}={'FILE' if one else 'FOLDER'}, or set {variable} ({type(failure).__name__})"
    ) from failure


def _download(hub_id: str, files: Sequence[str]) -> str:
    """The shell command that fetches exactly these files."""
    what = [f"--include '{pattern}'" if "*" in pattern else pattern for pattern in files]
    return " ".join(["hf download", hub_id, *what])


def _library(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RewardUnavailable(f"reward {name!r} needs {module}: pip install {module}") from error


def _read_state(name: str, file: Path, use: Callable[[Mapping[str, Tensor]], Any]) -> Any:
    """use(the tensors of a .safetensors or torch file, never other objects)."""
    try:
        if file.suffix == ".safetensors":
            state = _library(name, "safetensors.torch").load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
        return use(state.get("state_dict", state))
    except RewardUnavailable:
        raise
    except Exception as error:  # whatever a broken, incomplete or foreign file raises
        raise RewardUnavailable(
            f"reward {name!r}: {file} is not its checkpoint: {_one_line(error)[:200]}"
        ) from error


def _load(name: str, kind: str, source: Path | None, **options: Any) -> Any:
    """A frozen model of transformers in fp32 from a folder, or from config= and state_dict=.

    RewardUnavailable where a weight does not fit: transformers itself would draw it at random.
    """
    _library(name, "torchvision")  # needed by the first batch
    transformers = _library(name, "transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = getattr(transformers, kind).from_pretrained(
            source,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
        if info["missing_keys"] or info["mismatched_keys"]:
            wrong = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
            raise ValueError(f"weights missing or of another shape: {', '.join(wrong)}")
    except Exception as error:  # whatever a broken or foreign file raises
        raise RewardUnavailable(
            f"reward {name!r}: no {kind} in {source or 'its checkpoint'}: {_one_line(error)[:200]}"
        ) from error
    return model.eval().requires_grad_(False)


def _load_tokenizer(name: str, kind: str, folder: Path) -> Any:
    """A tokenizer of transformers. RewardUnavailable where the folder has none: transformers itself
    would make one without words.
    """
    transformers = _library(name, "transformers")
    try:
        tokenizer = getattr(transformers, kind).from_pretrained(folder)
        words = tokenizer("a cat")["input_ids"][1:-1]
        if not words or tokenizer.unk_token_id in words:
            raise ValueError("it does not know the words 'a cat'")
        return tokenizer
    except Exception as error:  # whatever a broken or foreign file raises
        raise RewardUnavailable(
            f"reward {name!r}: no {kind} in {folder}: {_one_line(error)[:200]}"
        ) from error


def _tower_sizes(layers: Sequence[Tensor], heads: int) -> dict[str, Any]:
    """Arguments of a transformers config, of the first feed-forward matrix of every layer."""
    inner, width = layers[0].shape
    return dict(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=len(layers),
        num_attention_heads=heads, hidden_act="gelu",
    )  # fmt: skip


def _rename(key: str, names: Iterable[tuple[str, str]]) -> str:
    for pattern, new in names:
        key = re.sub(pattern, new, key)
    return key


# --------------------------------------------------------------------------------------------------
# CLIP: clipscore, pickscore, aesthetic, hpsv2
# --------------------------------------------------------------------------------------------------

CLIP_L14 = "openai/clip-vit-large-patch14"
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def clip_pixels(images: Tensor, side: int) -> Tensor:
    """uint8 (B, 3, H, W) -> CLIP's input (B, 3, side, side): shortest edge to `side` by bicubic
    interpolation with rounding to levels, as Pillow does it (within 1 of 255), and centre crop.
    """
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as F

    images = F.resize(images, [side], InterpolationMode.BICUBIC, antialias=True)
    top, left = (images.shape[2] - side) // 2, (images.shape[3] - side) // 2
    images = images[:, :, top : top + side, left : left + side]
    return F.normalize(images.float() / 255, CLIP_MEAN, CLIP_STD)


def hps_pixels(images: Tensor, side: int, antialias: bool = True) -> Tensor:
    """uint8 (B, 3, H, W) -> HPSv2's input (B, 3, side, side): longest edge to `side` by bicubic
    interpolation of floats, padded with black (HPSv2@866735e).
    """
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as F

    size = [max(1, round(n * side / max(images.shape[2:]))) for n in images.shape[2:]]
    floats = F.resize(images.float() / 255, size, InterpolationMode.BICUBIC, antialias=antialias)
    top, left = (side - size[0]) // 2, (side - size[1]) // 2
    floats = F.pad(floats, [left, top, side - size[1] - left, side - size[0] - top])
    return F.normalize(floats, CLIP_MEAN, CLIP_STD)


class ClipPair:
    """The two towers of a CLIPModel: unit embeddings (B, D) in fp32, whatever the towers' dtype."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        device: str | torch.device,
        dtype: torch.dtype,
        pixels: Callable[[Tensor, int], Tensor] = clip_pixels,
    ) -> None:
        self.logit_scale = float(model.logit_scale.exp())  # in half precision off by 1 %
        self.model, self.tokenizer = model.to(device, dtype), tokenizer
        self.device, self.dtype, self._pixels = device, dtype, pixels
        self.side = model.config.vision_config.image_size
        self.max_length = model.config.text_config.max_position_embeddings

    def embed_images(self, images: Tensor) -> Tensor:
        """uint8 (B, 3, H, W) -> (B, D)."""
        return self.embed_pixels(self._pixels(images, self.side))

    def embed_pixels(self, pixels: Tensor) -> Tensor:
        """The model's own input (B, 3, side, side) -> (B, D)."""
        return _unit(self.model.get_image_features(pixel_values=pixels.to(self.dtype)))

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """B texts, cut to the model's context, -> (B, D). Padding is behind a causal mask."""
        tokens = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=self.max_length,
            return_tensors="pt",
        )  # fmt: skip
        return _unit(self.model.get_text_features(input_ids=tokens["input_ids"].to(self.device)))

    def cosine(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """(B,) cosines of image i and prompt i; a prompt that occurs often is encoded once."""
        once = list(dict.fromkeys(prompts))
        texts = self.embed_texts(once)[[once.index(prompt) for prompt in prompts]]
        return (self.embed_images(images) * texts).sum(-1)


def _unit(features: Any) -> Tensor:
    """Normalised in fp32; transformers 5 returns an object, 4 returned the tensor."""
    return torch.nn.functional.normalize(
        getattr(features, "pooler_output", features).float(), dim=-1
    )


class AffineHead:
    """A stack of linear layers without a nonlinearity, folded in float64 into one: w.x + b.

    state holds `prefix`N.weight and .bias, N ascending; (B, D) -> (B,) in fp32.
    """

    def __init__(
        self, state: Mapping[str, Tensor], prefix: str, device: str | torch.device
    ) -> None:
        found = (re.fullmatch(re.escape(prefix) + r"(\d+)\.weight", key) for key in state)
        layers = [f"{prefix}{n}" for n in sorted(int(match[1]) for match in found if match)]
        weight = torch.eye(state[f"{prefix}0.weight"].shape[1], dtype=torch.float64)
        bias = torch.zeros(len(weight), dtype=torch.float64)
        for layer in layers:
            matrix = state[f"{layer}.weight"].double()
            weight, bias = matrix @ weight, matrix @ bias + state[f"{layer}.bias"].double()
        (row,), (offset,) = weight, bias  # one output
        self.weight, self.bias = row.float().to(device), offset.float().to(device)

    def __call__(self, x: Tensor) -> Tensor:
        """(B, D) -> (B,)."""
        return x.float() @ self.weight + self.bias


def _on_gpu(score: Callable[[Tensor, Sequence[str]], Tensor], device: Any) -> Reward:
    return Reward(lambda images, prompts, metas: score(images, prompts).tolist(), "gpu", device)


def _load_clip(name: str, folder: Path, device: Any, dtype: Any) -> ClipPair:
    tokenizer = _load_tokenizer(name, "CLIPTokenizer", folder)
    return ClipPair(_load(name, "CLIPModel", folder), tokenizer, device, dtype)


@register("clipscore")
def _(device: Any, dtype: Any, path: str | None = None, scale: float = 1) -> Reward:
    """Cosine of CLIP ViT-L/14 / scale (DiffusionNFT@24af555: 1, DGPO@01ceb4b: 0.3), image resized
    by bicubic interpolation as CLIP was trained (theirs: bilinear).
    """
    _check_positive("scale", scale)
    folder = checkpoint("clipscore", CLIP_L14, "1.7 GB", path)
    clip = _load_clip("clipscore", folder, device, dtype)
    return _on_gpu(lambda images, prompts: clip.cosine(images, prompts) / scale, device)


@register("pickscore")
def _(device: Any, dtype: Any, path: str | None = None, scale: float = 1) -> Reward:
    """PickScore exp(logit_scale) cos / scale (arXiv 2305.01569); flow_grpo@ac4c86e: scale 26."""
    _check_positive("scale", scale)
    folder = checkpoint("pickscore", "yuvalkirstain/PickScore_v1", "3.9 GB", path)
    clip = _load_clip("pickscore", folder, device, dtype)
    factor = clip.logit_scale / scale
    return _on_gpu(lambda images, prompts: clip.cosine(images, prompts) * factor, device)


@register("aesthetic")
def _(device: Any, dtype: Any, path: str | None = None, head: str | None = None) -> Reward:
    """LAION's aesthetic predictor v2, about 1 to 10: an affine map of CLIP's image embedding
    (ddpo-pytorch@1958463). path: CLIP ViT-L/14; head: sac+logos+ava1-l14-linearMSE, .pth or
    .safetensors. The prompt plays no part.
    """
    folder = checkpoint("aesthetic", CLIP_L14, "1.7 GB", path)
    file = checkpoint(
        "aesthetic", "ttj/sac-logos-ava1-l14-linearMSE", "3.7 MB", head,
        option="head", files=["model.safetensors"],
    )  # fmt: skip
    affine = _read_state("aesthetic", file, lambda state: AffineHead(state, "layers.", device))
    clip = _load_clip("aesthetic", folder, device, dtype)
    return _on_gpu(lambda images, prompts: affine(clip.embed_images(images)), device)


HPS_FILES = {"v2.0": "HPS_v2_compressed.pt", "v2.1": "HPS_v2.1_compressed.pt"}
HPS_HEADS = 16  # attention heads of both towers of ViT-H/14: the one size that no shape tells
OPEN_CLIP_NAMES = [  # open_clip -> transformers, in this order
    (r"^(visual\.)?positional_embedding$", r"\1embeddings.position_embedding.weight"),
    (r"^token_embedding", "embeddings.token_embedding"),
    (r"^ln_final", "final_layer_norm"),
    (r"^visual\.class_embedding", "visual.embeddings.class_embedding"),
    (r"^visual\.conv1", "visual.embeddings.patch_embedding"),
    (r"^visual\.ln_pre", "visual.pre_layrnorm"),  # transformers' own spelling
    (r"^visual\.ln_post", "visual.post_layernorm"),
    (r"^(visual\.)?transformer\.resblocks", r"\1encoder.layers"),
    (r"\.ln_(\d)", r".layer_norm\1"),
    (r"\.mlp\.c_fc", ".mlp.fc1"),
    (r"\.mlp\.c_proj", ".mlp.fc2"),
    (r"\.attn\.", ".self_attn."),
    (r"^(?=embeddings|encoder|final)", "text_model."),
    (r"^visual\.(?!proj)", "vision_model."),
]


def from_open_clip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of an open_clip ViT under the names and in the layout of transformers' CLIPModel."""
    out = {}
    for old, value in state.items():
        key = _rename(old, OPEN_CLIP_NAMES)
        if key == "attn_mask":  # open_clip's causal mask, no weight
            continue
        if key == "text_projection":
            out["text_projection.weight"] = value.T.contiguous()
        elif key == "visual.proj":
            out["visual_projection.weight"] = value.T.contiguous()
        elif ".in_proj_" in key:
            for part, chunk in zip("qkv", value.chunk(3), strict=True):
                out[key.replace("in_proj_", f"{part}_proj.")] = chunk
        else:
            out[key] = value
    return out


def open_clip_config(state: Mapping[str, Tensor], heads: int) -> dict[str, Any]:
    """Arguments of CLIPConfig for an open_clip ViT with GELU, read off its weights."""

    def tower(prefix: str) -> dict[str, Any]:
        start, end = f"{prefix}transformer.resblocks.", ".mlp.c_fc.weight"
        layers = [v for k, v in state.items() if k.startswith(start) and k.endswith(end)]
        return _tower_sizes(layers, heads)

    vocabulary, length = len(state["token_embedding.weight"]), len(state["positional_embedding"])
    patch, places = (
        state["visual.conv1.weight"].shape[-1],
        len(state["visual.positional_embedding"]),
    )
    text = dict(
        vocab_size=vocabulary, max_position_embeddings=length,
        bos_token_id=vocabulary - 2, eos_token_id=vocabulary - 1, pad_token_id=vocabulary - 1,
    )  # fmt: skip
    vision = dict(patch_size=patch, image_size=patch * math.isqrt(places - 1))
    return dict(
        projection_dim=state["text_projection"].shape[1],
        text_config={**tower(""), **text},
        vision_config={**tower("visual."), **vision},
    )


_LOOKALIKES = {  # what ftfy, which open_clip's tokenizer runs first, makes of them
    **dict.fromkeys(range(0x201C, 0x2020), '"'),
    **dict.fromkeys((0x02BC, *range(0x2018, 0x201C)), "'"),
    **{  # full-width forms, ligatures
        code: unicodedata.normalize("NFKC", chr(code))
        for code in (0x3000, *range(0xFB00, 0xFB07), *range(0xFF01, 0xFFEF))
    },
}


def clean_prompt(text: str) -> str:
    """The cleaning of open_clip's tokenizer before CLIP's own: ftfy if it is installed, else the
    part of it that prompts need (5 of Flow-GRPO's 26,018 differ); then HTML entities.
    """
    try:
        import ftfy
    except ImportError:
        text = unicodedata.normalize("NFC", html.unescape(text).translate(_LOOKALIKES))
    else:
        text = ftfy.fix_text(text)
    return html.unescape(html.unescape(text))


@register("hpsv2")
def _(
    device: Any,
    dtype: Any,
    path: str | None = None,
    tokenizer: str | None = None,
    version: str = "v2.1",
    antialias: bool = True,
    scale: float = 1,
) -> Reward:
    """Human Preference Score v2, cosine / scale, about 0.2 to 0.35 (arXiv 2306.09341). path: its
    .pt file; tokenizer: any CLIP's. antialias=False resizes as in 2023, before torchvision 0.17.
    """
    _check_positive("scale", scale)
    if version not in HPS_FILES:
        raise ValueError(f"version must be one of {', '.join(HPS_FILES)}, got {version!r}")
    file = checkpoint("hpsv2", "xswu/HPSv2", "2.0 GB", path, files=[HPS_FILES[version]])
    folder = checkpoint("hpsv2", CLIP_L14, "4 MB", tokenizer, option="tokenizer", files=TOKENIZER)
    tokens = _load_tokenizer("hpsv2", "CLIPTokenizer", folder)
    sizes, weights = _read_state(
        "hpsv2", file, lambda state: (open_clip_config(state, HPS_HEADS), from_open_clip(state))
    )
    config = _library("hpsv2", "transformers").CLIPConfig(**sizes)
    model = _load("hpsv2", "CLIPModel", None, config=config, state_dict=weights)
    pixels = functools.partial(hps_pixels, antialias=antialias)
    clip = ClipPair(model, tokens, device, dtype, pixels)
    return _on_gpu(
        lambda images, prompts: clip.cosine(images, [clean_prompt(p) for p in prompts]) / scale,
        device,
    )


# --------------------------------------------------------------------------------------------------
# ImageReward
# --------------------------------------------------------------------------------------------------

IMAGEREWARD_HEADS = 16, 12  # attention heads of the vision and the text tower
BLIP_NAMES = [  # ImageReward's vision tower -> transformers' BlipVisionModel, in this order
    (r"^cls_token", "embeddings.class_embedding"),
    (r"^pos_embed", "embeddings.position_embedding"),
    (r"^patch_embed\.proj", "embeddings.patch_embedding"),
    (r"^norm\.", "post_layernorm."),
    (r"^blocks", "encoder.layers"),
    (r"\.attn\.qkv", ".self_attn.qkv"),
    (r"\.attn\.proj", ".self_attn.projection"),
    (r"\.norm(\d)", r".layer_norm\1"),
]


def from_imagereward(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(vision, text) weights under the names of transformers' BlipVisionModel, BlipTextModel."""
    vision, text = {}, {}
    for key, value in state.items():
        tower, _, rest = key.removeprefix("blip.").partition(".")
        if tower == "visual_encoder":
            vision[_rename(rest, BLIP_NAMES)] = value
        elif tower == "text_encoder" and rest != "embeddings.position_ids":
            text[rest] = value
    return vision, text


def imagereward_configs(
    vision: Mapping[str, Tensor], text: Mapping[str, Tensor], heads: tuple[int, int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of BlipVisionConfig and BlipTextConfig, read off the weights."""

    def tower(state: Mapping[str, Tensor], end: str, heads: int) -> dict[str, Any]:
        layers = [v for k, v in state.items() if k.endswith(end) and "attention" not in k]
        return _tower_sizes(layers, heads)

    patch = vision["embeddings.patch_embedding.weight"].shape[-1]
    places = vision["embeddings.position_embedding"].shape[1]
    words = text["embeddings.word_embeddings.weight"]
    a = dict(
        **tower(vision, ".mlp.fc1.weight", heads[0]), patch_size=patch,
        image_size=patch * math.isqrt(places - 1), layer_norm_eps=1e-6,
    )  # fmt: skip
    b = dict(
        **tower(text, ".intermediate.dense.weight", heads[1]), vocab_size=len(words),
        max_position_embeddings=len(text["embeddings.position_embeddings.weight"]),
        encoder_hidden_size=a["hidden_size"], layer_norm_eps=1e-12,
    )  # fmt: skip
    return a, b


class ImageRewardModel:
    """ImageReward v1.0 (arXiv 2304.05977, ImageReward@c1392c6): BLIP's text tower reads the prompt,
    cut to 35 tokens, and looks at the image; an affine head scores the state of [CLS].
    """

    mean, std = 0.16717362830052426, 1.0333394966054072  # official, over their training data

    def __init__(
        self, file: Path, tokenizer: Any, device: str | torch.device, dtype: torch.dtype
    ) -> None:
        name = "imagereward"

        def use(state: Mapping[str, Tensor]) -> tuple[Any, ...]:
            towers = from_imagereward(state)
            sizes = imagereward_configs(*towers, IMAGEREWARD_HEADS)
            return *towers, *sizes, AffineHead(state, "mlp.layers.", device)

        vision, text, a, b, self.head = _read_state(name, file, use)
        blip = _library(name, "transformers")
        self.vision = _load(
            name, "BlipVisionModel", None, config=blip.BlipVisionConfig(**a), state_dict=vision
        ).to(device, dtype)
        self.text = _load(
            name, "BlipTextModel", None, config=blip.BlipTextConfig(**b), state_dict=text,
            add_pooling_layer=False,
        ).to(device, dtype)  # fmt: skip
        self.tokenizer, self.device, self.dtype = tokenizer, device, dtype

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """uint8 (B, 3, H, W) and B prompts -> (B,) in fp32."""
        tokens = self.tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=35,
            return_tensors="pt",
        )  # fmt: skip
        pixels = clip_pixels(images, self.vision.config.image_size)
        seen = self.vision(pixel_values=pixels.to(self.dtype)).last_hidden_state
        state = self.text(
            input_ids=tokens["input_ids"].to(self.device),
            attention_mask=tokens["attention_mask"].to(self.device),
            encoder_hidden_states=seen,
        ).last_hidden_state[:, 0]
        return (self.head(state) - self.mean) / self.std


@register("imagereward")
def _(device: Any, dtype: Any, path: str | None = None, tokenizer: str | None = None) -> Reward:
    """ImageReward v1.0, about -2.3 to 2 (class ImageRewardModel). path: ImageReward.pt; tokenizer:
    BERT's, uncased.
    """
    file = checkpoint(
        "imagereward", "zai-org/ImageReward", "1.8 GB", path, files=["ImageReward.pt"]
    )
    folder = checkpoint(
        "imagereward", "google-bert/bert-base-uncased", "1 MB", tokenizer,
        option="tokenizer", files=TOKENIZER,
    )  # fmt: skip
    tokens = _load_tokenizer("imagereward", "BertTokenizer", folder)
    model = ImageRewardModel(file, tokens, device, dtype)
    return _on_gpu(model, device)


# --------------------------------------------------------------------------------------------------
# GenEval's detector for photographs
# --------------------------------------------------------------------------------------------------

# COCO's classes in order, under the names of object_names.txt, geneval@af4902f
OBJECTS = re.split(
    r",\s",
    """person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light,
fire hydrant, stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear,
zebra, giraffe, backpack, umbrella, handbag, tie, suitcase, frisbee, skis, snowboard, sports ball,
kite, baseball bat, baseball glove, skateboard, surfboard, tennis racket, bottle, wine glass, cup,
fork, knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot, hot dog, pizza, donut,
cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop, computer mouse, tv remote,
computer keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book, clock, vase,
scissors, teddy bear, hair drier, toothbrush""",
)
DETECTOR_SIDES = 800, 1333  # pixels: shortest edge, longest at most
COLORS = ["red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"]
COLOR_TEMPLATES = "a photo of a {c} {o}", "a photo of a {c}-colored {o}", "a photo of a {c} object"


class Instance(NamedTuple):
    """One object of an image: index into OBJECTS, score, box of whole pixels, mask (H, W)."""

    label: int
    score: float
    box: tuple[int, int, int, int]
    mask: Tensor


def instances(
    class_logits: Tensor,
    mask_logits: Tensor,
    padded: tuple[int, int],
    resized: tuple[int, int],
    size: tuple[int, int],
    min_score: float = 0.3,
) -> list[Instance]:
    """The objects that Mask2Former sees in one image, best class probability first.

    As mmdet 2.x, which GenEval runs: class_logits (Q, classes + 1), the best 100 pairs of query and
    class; mask_logits (Q, h, w), enlarged to the network's input `padded`, cut to the `resized`
    image in it, scaled to the image's own `size`; score = class probability * mean sigmoid inside
    the mask. Nothing below min_score, the lowest that GenEval's rule asks for, is returned.
    """
    probabilities = class_logits.float().softmax(-1)[:, :-1]  # the last class is "no object"
    best = probabilities.flatten().topk(min(100, probabilities.numel()))
    chosen = best.indices[best.values > min_score]  # a score is never above its probability
    if not len(chosen):
        return []
    queries, labels = chosen // probabilities.shape[1], chosen % probabilities.shape[1]
    masks = _enlarge(mask_logits[queries].float(), padded)[:, : resized[0], : resized[1]]
    masks = _enlarge(masks, size)
    inside = masks > 0
    certainty = (masks.sigmoid() * inside).sum((1, 2)) / (inside.sum((1, 2)) + 1e-6)
    scores = (probabilities.flatten()[chosen] * certainty).tolist()
    return [
        Instance(label, score, _box(mask), mask)
        for label, score, mask in zip(labels.tolist(), scores, inside, strict=True)
        if score > min_score  # an empty mask has score 0
    ]


def _enlarge(masks: Tensor, size: Sequence[int]) -> Tensor:
    """(N, h, w) -> (N, *size)."""
    return torch.nn.functional.interpolate(masks[None], tuple(size), mode="bilinear")[0]


def _box(mask: Tensor) -> tuple[int, int, int, int]:
    """x0, y0, x1 + 1, y1 + 1 of a mask that is not empty."""
    columns, rows = mask.any(0).nonzero().flatten(), mask.any(1).nonzero().flatten()
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


class Mask2FormerDetector:
    """GenEval's detector in transformers: Mask2Former (Swin-S, COCO instances), colours by CLIP.

    The architecture of geneval@af4902f from another training run, so scores near the thresholds
    differ: numbers are comparable among themselves, not with the published benchmark. The detector
    runs in fp32, `dtype` is CLIP's.
    """

    kind = "gpu"

    def __init__(
        self, path: str | None, clip_path: str | None, device: Any, dtype: torch.dtype
    ) -> None:
        folder = checkpoint(
            "geneval", "facebook/mask2former-swin-small-coco-instance", "275 MB", path
        )
        clip = checkpoint("geneval", CLIP_L14, "1.7 GB", clip_path, option="clip_path")
        model = _load("geneval", "Mask2FormerForUniversalSegmentation", folder)
        names = model.config.id2label
        if (len(names), names.get(0), names.get(79)) != (80, "person", "toothbrush"):
            raise RewardUnavailable(
                f"reward 'geneval': {folder} has {len(names)} classes from {names.get(0)!r} to"
                f" {names.get(len(names) - 1)!r}, not COCO's 80 from 'person' to 'toothbrush'"
            )
        self.model = model.to(device)
        self.clip = _load_clip("geneval", clip, device, dtype)
        self._colors: dict[str, Tensor] = {}  # class -> embeddings (10, D) of its colours

    def check(self, meta: Metadata) -> None:
        """ValueError unless this is GenEval's metadata with classes and colours known here."""
        check_metadata(meta)
        for part in ("include", "exclude"):
            for i, clause in enumerate(meta.get(part, ())):
                for field, known in (("class", OBJECTS), ("color", COLORS)):
                    value = clause.get(field, known[0])
                    rule = f"is none of the {len(known)} known to the detector"
                    _require(value in known, f"{part}[{i}].{field}", rule, value)

    def __call__(self, images: Tensor, metas: Sequence[Metadata]) -> list[list[Detection]]:
        """uint8 (B, 3, H, W) -> the detections of each image; only what needs a colour gets one."""
        pixels, resized = detector_pixels(images)
        out = self.model(pixel_values=pixels)
        size, padded = _size(images), _size(pixels)
        found = []
        for image, meta, classes, masks in zip(
            images, metas, out.class_queries_logits, out.masks_queries_logits, strict=True
        ):
            objects = instances(classes, masks, padded, resized, size)
            wanted = {clause["class"] for clause in meta["include"] if "color" in clause}
            colored = [o for o in objects if OBJECTS[o.label] in wanted]
            others = [o for o in objects if OBJECTS[o.label] not in wanted]
            colors = [*self.classify(image, colored), *[""] * len(others)]
            found.append(
                [
                    Detection(OBJECTS[o.label], o.score, o.box, color)
                    for o, color in zip(colored + others, colors, strict=True)
                ]
            )
        return found

    def classify(self, image: Tensor, objects: Sequence[Instance]) -> list[str]:
        """The colour of each object: zero-shot CLIP on its box, #999999 outside its mask."""
        if not objects:
            return []
        crops = []
        for _, _, (x0, y0, x1, y1), mask in objects:
            crop = torch.where(mask, image, 0x99)[:, y0:y1, x0:x1]
            crops.append(clip_pixels(crop[None], self.clip.side))
        embeddings = self.clip.embed_pixels(torch.cat(crops))
        return [
            COLORS[int((self.color_texts(OBJECTS[o.label]) @ embedding).argmax())]
            for o, embedding in zip(objects, embeddings, strict=True)
        ]

    def color_texts(self, label: str) -> Tensor:
        """Unit embeddings (10, D) of the colours of a class: the mean over three templates."""
        if label not in self._colors:
            texts = [t.format(c=color, o=label) for color in COLORS for t in COLOR_TEMPLATES]
            mean = self.clip.embed_texts(texts).unflatten(0, (len(COLORS), -1)).mean(1)
            self._colors[label] = _unit(mean)
        return self._colors[label]


def _size(images: Tensor) -> tuple[int, int]:
    return images.shape[2], images.shape[3]


def detector_pixels(images: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """uint8 (B, 3, H, W) -> (Mask2Former's input, size (h, w) of the image in it): scaled to
    DETECTOR_SIDES, ImageNet's mean and std, padded with 0 to multiples of 32.
    """
    from torchvision.transforms.v2 import functional as F

    H, W = _size(images)
    factor = min(DETECTOR_SIDES[0] / min(H, W), DETECTOR_SIDES[1] / max(H, W))
    h, w = int(H * factor + 0.5), int(W * factor + 0.5)
    pixels = F.resize(images, [h, w], antialias=True).float() / 255
    pixels = F.normalize(pixels, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    return F.pad(pixels, [0, 0, -w % 32, -h % 32]), (h, w)


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
    scale: float = 1,
    workers: int = 16,
    tries: int = 3,
    timeout: float = 60,
) -> Reward:
    """UnifiedReward's score of 1 to 5 (arXiv 2503.05236) / scale; flow_grpo@ac4c86e: scale 5.

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
        name, hub_id = "llava_bertscore", "microsoft/deberta-xlarge-mnli"
        source = checkpoint(name, hub_id, "750 M parameters", path, files=PICKLED)
        self.tokenizer = _load_tokenizer(name, "AutoTokenizer", source)
        self.tokenizer.padding_side = "right"
        model = _load(name, "AutoModel", source).to(device, dtype)
        layers = model.encoder.layer
        if len(layers) < layer:
            raise ValueError(f"layer must be 1..{len(layers)} for {source}, got {layer}")
        model.encoder.layer = layers[:layer]
        self.model = model
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
    names = [f"stage {n} {stage.pop('name', '')}".split() for n, stage in enumerate(stages, 1)]
    return [(f"--curriculum: {file}, {' '.join(name)}", s) for name, s in zip(names, stages)]


def load_pairs(path: str, stages: Sequence[Any]) -> tuple[list[Any], Any]:
    """Offline preferences: lines of "prompt" and two image files, "winner" and "loser", absolute or
    beside the file -> (the stages of the run with these rows and a reward of 1 or 0, pair_images),
    or one line that names the faulty line and field. Every row is used twice in turn: as the
    winner, then as the loser.
    """
    folder, where = Path(path).parent, f"--pairs: {path}"
    for field in ("prompts", "reward"):
        if len({getattr(stage.args, field) for stage in stages}) > 1:
            raise SystemExit(f"--pairs: brings its own {field}; drop {field!r} from the stages")
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
    from torchvision.transforms.v2 import functional as F

    images = []
    for i, row in enumerate(rows):
        image = read_image(row["loser" if i % 2 else "winner"], "pairs")
        images.append(F.center_crop(F.resize(image, [side], antialias=True), [side, side]))
    return torch.stack(images)


def read_image(file: str | Path, flag: str) -> Tensor:
    """(3, H, W), fp32 in [0, 1]; SystemExit in one line for a file that is no picture."""
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms.v2 import functional as F

    try:
        image = decode_image(str(file), ImageReadMode.RGB)
    except RuntimeError:
        raise SystemExit(f"--{flag}: {file} is no JPEG, PNG, WebP or GIF picture") from None
    image = image[0] if image.dim() == 4 else image  # the first frame of an animation
    return F.to_dtype(image, torch.float32, scale=True)  # 16 bits a channel too


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
        if name in out:
            raise SystemExit(f"--reward: {name} is there twice; give one weight")
        try:
            out[name] = float(weight or 1)
        except ValueError:
            raise SystemExit(f"--reward: {part!r} is not NAME or NAME:WEIGHT") from None
    total = sum(map(abs, out.values()))
    if not 0 < total < math.inf:
        raise SystemExit(f"--reward: weights in {text!r} add up to {total}")
    return out


def load_rewards(
    names: Iterable[str | None], options: dict[str, dict[str, Any]], device: str
) -> dict[str, Reward]:
    """Load each named reward once, with its options, and let it test itself. SystemExit in one line
    if something it needs is missing or broken.
    """
    out = {}
    for name in dict.fromkeys(filter(None, names)):
        try:
            out[name] = make_reward(name, device=device, **options.get(name, {}))
            out[name].self_test()
        except (RuntimeError, ValueError) as error:
            raise SystemExit(f"--reward {name}: {error}") from None
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
    """Rewards (N, B) in native scale, on the CPU; NaN where a sample could not be scored.
    SystemExit in one line if a reward has become unavailable.
    """
    prompts, values = [row["prompt"] for row in rows], []
    for name, fn in rewards.items():
        try:
            values.append(fn(images, prompts, list(rows)).cpu())
        except RewardUnavailable as error:
            raise SystemExit(f"--reward {name}: {error}") from None
    return torch.stack(values)


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


# --------------------------------------------------------------------------------------------------
# python rewards.py --check NAME
# --------------------------------------------------------------------------------------------------


def check_reward(name: str, opts: dict[str, Any], image: Tensor | None, prompt: str) -> bool:
    """Load a reward, downloading nothing, and print whether it can run here, and its score of one
    (3, H, W) image.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        row = _parse_row(prompt) if prompt.lstrip().startswith("{") else {"prompt": prompt}
        reward = make_reward(name, device, **opts)
        reward.self_test()
        if image is not None:
            value = reward(image[None], [row["prompt"]], [row]).item()
            print(f"{name}: {value:.6g}")
            return math.isfinite(value)
    except (RuntimeError, ValueError) as error:
        print(f"{name}: cannot run: {error}")
        return False
    print(f"{name}: can run on this machine, {device if reward.kind == 'gpu' else reward.kind}")
    return True


def main(argv: Sequence[str] | None = None) -> None:
    """Can a reward run on this machine, and what does it say of a picture? Exit status 1: no."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a check downloads nothing
    parser = argparse.ArgumentParser(description=main.__doc__)
    names = ", ".join(sorted(REWARDS))
    parser.add_argument("--check", required=True, metavar="NAME", help=f"all, or one of {names}")
    parser.add_argument("--image", metavar="FILE", help="score this picture")
    parser.add_argument(
        "--prompt", metavar="TEXT", help="its prompt; for GenEval, a line of a .jsonl prompt file"
    )
    parser.add_argument(
        "--option", metavar="KEY=VALUE", action="append", default=[],
        help="option of the reward, as detector=mask2former",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.check != "all":
        check_name(args.check, "check")
    if (args.image is None) != (args.prompt is None):
        raise SystemExit("--image: give --image FILE and --prompt TEXT together")
    if args.check == "all" and args.option:
        raise SystemExit("--option: belongs to one reward; use --check NAME in place of all")
    image = None if args.image is None else read_image(args.image, "image")
    opts = {}
    for option in args.option:
        key, equals, value = option.partition("=")
        if not equals:
            raise SystemExit(f"--option: {option!r} is not KEY=VALUE, as detector=mask2former")
        try:
            opts[key] = json.loads(value)
        except ValueError:
            opts[key] = value  # a text without quotes
    chosen = list(REWARDS) if args.check == "all" else [args.check]
    results = [check_reward(name, opts, image, args.prompt or "") for name in chosen]
    raise SystemExit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
