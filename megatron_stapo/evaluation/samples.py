"""Every response of an evaluation on disk: a journal while it runs, Parquet for analysis."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from megatron_stapo.rewards import Outcome

JOURNAL_FILE = "samples.jsonl"
SAMPLES_FILE = "samples.parquet"

SampleKey = tuple[str, int, int]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response to one problem of a benchmark."""

    benchmark: str
    row: int
    """Of the benchmark's source."""
    sample: int
    """Number among the responses to the problem, from 0."""
    problem: str
    answer: str
    """Ground truth."""
    response: str
    """Decoded, without special tokens."""
    num_tokens: int
    """The stop token included."""
    is_truncated: bool
    rule_correct: bool
    rule_outcome: Outcome
    """Of `rewards.Verdict`."""
    extracted: str | None
    """What the rule compared."""
    model_verdict: str | None = None
    """Of the model verifier; None where it was not asked."""

    @property
    def key(self) -> SampleKey:
        """What tells it apart."""
        return self.benchmark, self.row, self.sample

    @property
    def is_correct(self) -> bool:
        """The rule's word, or else the model's."""
        return self.rule_correct or self.model_verdict == "correct"


class SampleJournal:
    """Append-only JSONL file: a line per finished sample, as the rule judged it."""

    def __init__(self, path: Path) -> None:
        """Open the journal and read what it holds.

        A last line without its newline was torn when its writer was killed; it is cut off, and its
        sample drawn again.
        """
        self.samples: dict[SampleKey, Sample] = {}
        whole = b""
        if path.exists():
            whole = path.read_bytes()
            whole = whole[: whole.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._add(Sample(**json.loads(line)))
        self._file = open(path, "ab")  # noqa: SIM115
        self._file.truncate(len(whole))

    def append(self, sample: Sample) -> None:
        """Add a sample; it outlives the process."""
        self._add(sample)
        self._file.write(json.dumps(dataclasses.asdict(sample)).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def _add(self, sample: Sample) -> None:
        self.samples[sample.key] = sample


def save_samples(samples: Sequence[Sample], path: Path) -> None:
    """Write samples as Parquet, with is_correct beside the fields; renamed into place."""
    import pyarrow
    import pyarrow.parquet

    rows = [{**dataclasses.asdict(s), "is_correct": s.is_correct} for s in samples]
    part = path.with_suffix(".part")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=_build_schema()), part)
    part.rename(path)


def _build_schema() -> object:
    """Given, because a column without a value has no type of its own."""
    import pyarrow

    kinds: dict[object, object] = {int: pyarrow.int64(), bool: pyarrow.bool_()}
    fields = [
        pyarrow.field(f.name, kinds.get(f.type, pyarrow.string()))
        for f in dataclasses.fields(Sample)
    ]
    return pyarrow.schema([*fields, pyarrow.field("is_correct", pyarrow.bool_())])
