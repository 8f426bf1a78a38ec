"""What a sample depends on, so that an evaluation is only resumed as itself."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_stapo.config import Config
from megatron_stapo.evaluation.evaluate import LoadedBenchmark

IDENTITY_FILE = "evaluation.json"

_SAMPLED_BYTES = 1 << 20


def compute_identity(config: Config, benchmarks: Sequence[LoadedBenchmark]) -> dict[str, Any]:
    """Settings, and digests of the model and of each benchmark.

    The number of samples and of problems is no part of it: an evaluation may grow.
    """
    return {
        "model": digest_model(Path(config.model.path)),
        "model.dtype": config.model.dtype,
        "evaluation.temperature": config.evaluation.temperature,
        "evaluation.top_p": config.evaluation.top_p,
        "max_response_tokens": config.max_evaluation_response_tokens,
        "data.prompt_suffix": config.data.prompt_suffix,
        "seed": config.seed,
        "rollout.engine": config.rollout.engine,
        "reward.rule": config.reward.rule,
        "reward.truncated": config.reward.truncated,
        "reward.timeout_s": config.reward.timeout_s,
        "benchmarks": {b.name: _digest_prompts(b) for b in benchmarks},
    }


def check_identity(folder: Path, identity: dict[str, Any]) -> None:
    """Refuse a folder that holds samples of something else; remember what it holds.

    Raises:
        ValueError: names what differs and both values.

    Mutates: evaluation.json gains benchmarks that are new.
    """
    path = folder / IDENTITY_FILE
    if path.exists():
        held = json.loads(path.read_text())
        for name, value in identity.items():
            if name == "benchmarks":
                for benchmark, rows in value.items():
                    # Of a benchmark that grew, the shorter one's problems must be the same.
                    old = held["benchmarks"].get(benchmark, rows)
                    if any(a != b for a, b in zip(old, rows, strict=False)):
                        raise ValueError(
                            f"benchmark {benchmark}: {folder} holds samples of other problems "
                            "under this name; give another --out."
                        )
            elif held.get(name) != value:
                raise ValueError(
                    f"{name}={value}: {folder} holds samples of {name}={held.get(name)}; give "
                    "another --out, or the settings of that evaluation to resume it."
                )
        longest = {
            name: max(held["benchmarks"].get(name, []), rows, key=len)
            for name, rows in identity["benchmarks"].items()
        }
        identity = {**identity, "benchmarks": {**held["benchmarks"], **longest}}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(identity) + "\n")
    part.rename(path)


def digest_model(folder: Path) -> str:
    """Tell models apart without reading them whole: config, and size, head and tail of each weight
    file. A file's head lists its tensors; training moves the last ones, too."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            digest.update(file.read(_SAMPLED_BYTES))
            file.seek(max(0, size - _SAMPLED_BYTES))
            digest.update(file.read())
    return digest.hexdigest()[:16]


def _digest_prompts(benchmark: LoadedBenchmark) -> list[str]:
    """A few characters per problem, of its row, its prompt's tokens and its ground truth."""
    return [
        hashlib.sha256(json.dumps([p.prompt_id, p.token_ids, p.answer]).encode()).hexdigest()[:8]
        for p in benchmark.prompts
    ]
