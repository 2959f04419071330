"""Prompt sets that are not part of this repository: turn what was downloaded into a prompt file.

Pick-a-Pic (arXiv 2305.01569; what users typed, unfiltered) and HPDv2 (arXiv 2306.09341). A file
that is missing or of another kind ends in one line that names the download. For instance

    hf download ymhao/HPDv2 train.json test.json --repo-type dataset --local-dir hpdv2
    python -m prompts.convert hpdv2 hpdv2/test.json --out hpdv2/heldout.jsonl
    python -m prompts.convert hpdv2 hpdv2/train.json --exclude hpdv2/heldout.jsonl \\
        --out hpdv2/train.jsonl
    python vgrpo.py --model sd35m --weights FOLDER --reward pickscore --prompts hpdv2
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from prompts.generate import excluded, write_prompts

# Where a row has its prompt, and what `hf download` needs to fetch the set.
FIELDS = {"pickapic": "caption", "hpdv2": "prompt"}
SOURCES = {
    "pickapic": "yuvalkirstain/pickapic_v1_no_images",  # train-*, validation_unique-*.parquet
    "hpdv2": "ymhao/HPDv2 train.json test.json",
}


@dataclass
class Args:
    """Settings."""

    kind: tyro.conf.Positional[Literal["pickapic", "hpdv2"]]
    """the set"""
    files: tyro.conf.Positional[tuple[str, ...]]
    """its files: .parquet, .json or .jsonl"""
    out: str
    """file to write: .txt or .jsonl"""
    exclude: str | None = None
    """prompt file whose prompts are left out: those of the evaluation"""


def read_rows(path: Path, field: str) -> list[Any]:
    """Rows of a .parquet, .json (one list) or .jsonl file; ValueError with the reason."""
    if path.suffix not in (".parquet", ".json", ".jsonl"):
        raise ValueError(f"{path} must end in .parquet, .json or .jsonl")
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            return list(parquet.read_table(path, columns=[field]).to_pylist())  # no pictures
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        rows = json.loads(text)
    except ImportError:
        raise ValueError(f"{path} needs pyarrow: pip install pyarrow") from None
    except ValueError as error:
        raise ValueError(f"{path} is no {path.suffix[1:]} file of rows: {error}") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds no list of rows")
    return rows


def convert(files: Sequence[str], field: str, without: set[str]) -> list[dict[str, Any]]:
    """The distinct prompts of the files in their order, on one line each, but for those `without`.
    A row is a text or has it under `field`; ValueError names the file and row that is neither.
    """
    if not files:
        raise ValueError("no files are named")
    prompts: dict[str, None] = {}
    for file in files:
        for number, row in enumerate(read_rows(Path(file), field), 1):
            text = row.get(field) if isinstance(row, dict) else row
            if not isinstance(text, str):
                raise ValueError(f"{file}, row {number}: no text under {field!r}")
            prompts[" ".join(text.split())] = None
    return [{"prompt": text} for text in prompts if text and text not in without]


def main(args: Args) -> None:
    """Read, convert, write."""
    if Path(args.out).suffix not in (".txt", ".jsonl"):
        raise SystemExit(f"--out: {args.out} must end in .txt or .jsonl")
    without = {row["prompt"] for row in excluded(args.exclude)}
    try:
        rows = convert(args.files, FIELDS[args.kind], without)
    except (OSError, ValueError) as error:
        get = f"hf download {SOURCES[args.kind]} --repo-type dataset --local-dir {args.kind}"
        raise SystemExit(
            f"{args.kind}: {' '.join(str(error).split())}; to download: {get}"
        ) from None
    if not rows:
        raise SystemExit(f"{args.kind}: no prompts are left of {', '.join(args.files)}")
    write_prompts(rows, args.out)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
