"""The paper's six benchmarks: where they are published, and how often each problem is sampled.

Owns the names under which results are reported; reading them is `load_problems`' part.
"""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One benchmark."""

    name: str
    source: str
    """Data source of the copy on the Hugging Face hub."""
    num_problems: int
    """Of the copy the paper most probably used, JustRL's, and of the one at `source`."""
    paper_num_samples: int
    """Responses per problem whose mean accuracy the paper reports."""


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            name="aime24",
            source="hub:HuggingFaceH4/aime_2024?split=train",
            num_problems=30,
            paper_num_samples=32,
        ),
        Benchmark(
            name="aime25",
            source="hub:opencompass/AIME2025?subset=AIME2025-I,AIME2025-II&split=test",
            num_problems=30,
            paper_num_samples=32,
        ),
        Benchmark(
            name="amc23",
            source="hub:math-ai/amc23?split=test",
            num_problems=40,
            paper_num_samples=32,
        ),
        Benchmark(
            name="math500",
            source="hub:HuggingFaceH4/MATH-500?split=test",
            num_problems=500,
            paper_num_samples=4,
        ),
        Benchmark(
            name="minerva",
            source="hub:math-ai/minervamath?split=test",
            num_problems=272,
            paper_num_samples=4,
        ),
        Benchmark(
            name="olympiadbench",
            source="hub:Hothan/OlympiadBench?subset=OE_TO_maths_en_COMP&split=train",
            num_problems=674,
            paper_num_samples=4,
        ),
    )
}
"""Source: STAPO, arXiv:2602.15620, section 4.1; the copies, github.com/thunlp/JustRL data/."""

_SPLITS = ("train", "test", "validation", "val", "dev")


def resolve_benchmark(text: str) -> tuple[str, str]:
    """Return the name to report under, and the data source.

    Args:
        text: a benchmark's name; NAME=SOURCE, for another copy of it or for a set of one's own; or
            a source alone, which is named after its file, folder, data set or task.

    Raises:
        ValueError: neither.
    """
    if text in BENCHMARKS:
        return text, BENCHMARKS[text].source
    name, equals, source = text.partition("=")
    if equals and source and re.fullmatch(r"[\w.-]+", name):
        return name, source
    place = text.partition("?")[0]
    kind, colon, rest = place.partition(":")
    if colon and kind in ("hub", "gym") and rest:
        return rest.rsplit("/", 1)[-1].lower(), text
    path = Path(place)
    if place and (path.exists() or path.suffix or "/" in place):
        # JustRL's files are all called test.parquet, in folders with the names.
        stem = path.parent.name if path.stem in _SPLITS and path.parent.name else path.stem
        return stem.lower(), text
    close = difflib.get_close_matches(text.lower(), BENCHMARKS)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    raise ValueError(
        f"benchmark {text}: unknown.{hint} Benchmarks: {', '.join(BENCHMARKS)}; or NAME=SOURCE."
    )


def check_size(name: str, num_problems: int) -> str | None:
    """Say so where a benchmark's copy has another number of problems than the paper's.

    Args:
        num_problems: distinct problems loaded.

    Returns:
        One line, None where there is nothing to say.
    """
    benchmark = BENCHMARKS.get(name)
    if benchmark is None or benchmark.num_problems == num_problems:
        return None
    return (
        f"benchmark {name}: {num_problems} problems, where the paper's copy has "
        f"{benchmark.num_problems}; the scores of the two are not comparable."
    )
