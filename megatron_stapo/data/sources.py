"""Problems in: from where a user names them to clean pairs of problem and answer.

Owns the forms in which data sets are published and what is taken off and left out on the way. A
source is one string:

    PATH        a .jsonl, .json or .parquet file, or a folder of such files of one kind
    hub:NAME    a data set of the Hugging Face hub, such as hub:HuggingFaceH4/MATH-500
    gym:TASK    procedural problems of reasoning-gym, such as gym:chain_sum

and takes options as PATH?key=value&key=value (percent-encoded where a value holds & or +):

    problem=, answer=   files and hub: the columns, where the form is not one of `FORMS`; a dotted
                        path reaches into a struct, as in reward_model.ground_truth
    subset=A,B          hub: configurations, read one after another
    split=              hub: needed where there is more than one
    size=, seed=        gym: how many distinct problems (500), and which (0)
    part=               gym: pretrain, train (the default) or heldout. A hash of the question
                        decides, so that no question is in two parts, whatever the other options;
                        pretrain is set aside for building base models
    NAME=               gym: any parameter of the task

A problem comes out without the instruction that DAPO's sets put around it, an answer without the
box or the dollars that some sets put around theirs. Nothing is left out without a count in the
`LoadReport`, and nothing is written outside a temporary folder, but for what the hub's own cache
keeps of a download.
"""

import contextlib
import json
import logging
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from megatron_stapo.data.gym import draw_problems
from megatron_stapo.rewards.answer import unwrap_ground_truth


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem, clean."""

    row: int
    """Row of the source, before anything was left out; the rows of further files and subsets count
    on. In a gym source, the position among the drawn problems."""
    problem: str
    """The bare problem: no instruction, no chat markup."""
    answer: str
    """Ground truth without a box, dollars and blanks around it; several answers joined by ", "."""


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What was read and what was left out. Each row read counts once: as a problem, or in the first
    of images, proofs, duplicates and Chinese that holds for it."""

    source: str
    num_rows: int
    num_images: int
    """Rows left out because their problem comes with an image."""
    num_proofs: int
    """Rows left out because they ask for a proof, which no answer can be compared with."""
    num_duplicates: int
    """Rows left out because an earlier one has the same problem; 0 where duplicates are kept."""
    num_conflicting: int
    """Those of the duplicates whose answer differs from that of the row kept."""
    num_chinese: int
    """Rows left out because their problem is in Chinese; 0 where Chinese is kept."""
    num_problems: int

    def format(self) -> str:
        """One line for people."""
        duplicates = f"{self.num_duplicates} duplicates"
        if self.num_conflicting:
            duplicates += f" ({self.num_conflicting} of them with another answer)"
        omissions = [
            text
            for count, text in (
                (self.num_duplicates, duplicates),
                (self.num_chinese, f"{self.num_chinese} in Chinese"),
                (self.num_images, f"{self.num_images} with an image"),
                (self.num_proofs, f"{self.num_proofs} that ask for a proof"),
            )
            if count
        ]
        line = f"{self.source}: {self.num_problems} problems"
        if omissions:
            line += f" of {self.num_rows} rows; left out: {', '.join(omissions)}"
        return line


@dataclass(frozen=True, kw_only=True)
class Form:
    """A published form of problems, recognised by its columns."""

    problem: str
    answer: str
    """Columns; a dotted path reaches into a struct."""
    is_chat: bool = False
    """Whether the problem is a list of turns {role, content} instead of a text."""
    beside: str | None = None
    """A further column without which it is not this form."""
    published_as: str


FORMS = (
    Form(
        problem="prompt",
        answer="reward_model.ground_truth",
        is_chat=True,
        published_as="BytedTsinghua-SIA/DAPO-Math-17k and AIME-2024; data/*/test.parquet of "
        "github.com/thunlp/JustRL; what verl reads",
    ),
    Form(
        problem="prompt",
        answer="solution",
        beside="source_prompt",
        published_as="open-r1/DAPO-Math-17k-Processed",
    ),
    Form(
        problem="question",
        answer="final_answer",
        published_as="Hothan/OlympiadBench, math-ai/olympiadbench",
    ),
    Form(
        problem="problem",
        answer="answer",
        published_as="HuggingFaceH4/aime_2024 and MATH-500, AI-MO/aimo-validation-amc; the files "
        "of tools/make_tiny_base.py",
    ),
    Form(
        problem="question",
        answer="answer",
        published_as="opencompass/AIME2025, math-ai/amc23, math-ai/minervamath",
    ),
)
"""A set that fits several is refused, so the order does not matter."""

_SUFFIXES = (".jsonl", ".json", ".parquet")
_BATCH_SIZE = 4096
_SPLIT_NAME = re.compile(r"(train|test|val|dev)")
_IMAGE_COLUMN = re.compile(r"images?(_\d+)?")
# The blocks of ideographs: unified, extension A, compatibility, extensions B and on.
_IDEOGRAPH = re.compile("[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\U00020000-\U0003ffff]")


def _match_blanks(text: str) -> str:
    return r"\s+".join(re.escape(word) for word in text.split())


_DAPO_INSTRUCTION = re.compile(
    r"\s*"
    + _match_blanks(
        "Solve the following math problem step by step. The last line of your response should be "
        "of the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
    )
    + r"\s+(?P<problem>.*?)\s+"
    + _match_blanks('Remember to put your answer on its own line after "Answer:".')
    + r"\s*",
    re.DOTALL,
)
"""Source: BytedTsinghua-SIA/DAPO-Math-17k as published."""


def load_problems(
    source: str, *, keep_duplicates: bool = False, drop_chinese: bool = False
) -> tuple[list[Problem], LoadReport]:
    """Read the problems of a source, in its order.

    Args:
        source: where they are; the module docstring says how it is written.
        keep_duplicates: keep rows whose problem, blanks aside, an earlier row has. Otherwise the
            first one stays: DAPO-Math-17k as published holds each problem about 100 times.
        drop_chinese: leave out problems with a Chinese character.

    Raises:
        ValueError: what the source names is missing, unreadable, of no known form or has no
            problems; an option is unknown; or a row lacks its problem or answer. Names the
            source, the place in it and the remedy.
    """
    kind, name, options = _split_source(source)
    with tempfile.TemporaryDirectory(prefix="stapo_data_") as cache, _silence_datasets():
        if kind == "gym":
            questions, answers = draw_problems(source, name, options)
            batches = iter([_Batch(questions, answers, "question", "answer")])
        elif kind == "hub":
            batches = _read_hub(source, name, options)
        else:
            batches = _read_files(source, Path(name), options, cache)
        return _collect(source, batches, keep_duplicates, drop_chinese)


@dataclass(frozen=True)
class _Batch:
    """Some consecutive rows as they stand in the source."""

    problems: list[Any]
    answers: list[Any]
    problem_column: str
    answer_column: str
    omissions: list[str | None] | None = None
    """"image" or "proof" where a row is to be left out; None where no row is."""


@dataclass(frozen=True)
class _Turns:
    """A chat that is not one user turn, in place of its text."""

    roles: list[str]


@dataclass(slots=True)
class _Kept:
    """The first row with a problem."""

    problem: Problem
    raw_answer: Any
    is_left_out: bool


def _collect(
    source: str, batches: Iterator[_Batch], keep_duplicates: bool, drop_chinese: bool
) -> tuple[list[Problem], LoadReport]:
    """Clean the rows, drop what is to be dropped, and count it."""
    problems: list[Problem] = []
    # By the text as it stands first: of a hundred copies one is cleaned.
    kept_by_text: dict[str, _Kept] = {}
    kept_by_problem: dict[str, _Kept] = {}
    num_rows = num_duplicates = num_conflicting = num_chinese = 0
    omitted = {"image": 0, "proof": 0}
    for batch in batches:
        for index, (text, raw_answer) in enumerate(zip(batch.problems, batch.answers, strict=True)):
            row = num_rows
            num_rows += 1
            if batch.omissions is not None and (omission := batch.omissions[index]):
                omitted[omission] += 1
                continue
            kept = kept_by_text.get(text) if isinstance(text, str) else None
            is_new = kept is None
            if kept is None:
                problem = _clean_problem(source, row, batch.problem_column, text)
                key = " ".join(problem.split())
                kept = kept_by_problem.get(key)
                is_new = kept is None
                if kept is None:
                    answer = _clean_answer(source, row, batch.answer_column, raw_answer)
                    kept = _Kept(
                        problem=Problem(row=row, problem=problem, answer=answer),
                        raw_answer=raw_answer,
                        is_left_out=drop_chinese and bool(_IDEOGRAPH.search(problem)),
                    )
                    kept_by_problem[key] = kept
                kept_by_text[text] = kept
            if is_new:
                if kept.is_left_out:
                    num_chinese += 1
                else:
                    problems.append(kept.problem)
                continue
            answer = kept.problem.answer
            # NaN is equal to nothing, so that it is found here, too.
            if raw_answer != kept.raw_answer:
                answer = _clean_answer(source, row, batch.answer_column, raw_answer)
            if not keep_duplicates:
                num_duplicates += 1
                num_conflicting += answer != kept.problem.answer
            elif kept.is_left_out:
                num_chinese += 1
            else:
                # Its own text, which may differ from the first's in blanks.
                problem = _clean_problem(source, row, batch.problem_column, text)
                problems.append(Problem(row=row, problem=problem, answer=answer))
    report = LoadReport(
        source=source,
        num_rows=num_rows,
        num_images=omitted["image"],
        num_proofs=omitted["proof"],
        num_duplicates=num_duplicates,
        num_conflicting=num_conflicting,
        num_chinese=num_chinese,
        num_problems=len(problems),
    )
    if not problems:
        raise ValueError(
            f"data source {report.format()}; none is left. Name a source with some, or keep what "
            "was left out."
            if num_rows
            else f"data source {source}: it has no rows; name one with problems."
        )
    return problems, report


def _clean_problem(source: str, row: int, column: str, text: Any) -> str:
    """Take off DAPO's instruction and surrounding blanks."""
    if text is None or (isinstance(text, str) and not text.strip()):
        raise ValueError(
            f"data source {source}: row {row} has no {column!r}; fill it or remove the row."
        )
    if isinstance(text, _Turns):
        raise ValueError(
            f"data source {source}: row {row} has the turns {', '.join(text.roles) or '(none)'} as "
            f"{column!r}, where a problem is one user turn; remove the others."
        )
    if not isinstance(text, str):
        raise ValueError(
            f"data source {source}: row {row} has {text!r:.80} as {column!r}, which is no text; "
            "name another column with problem=COLUMN."
        )
    instructed = _DAPO_INSTRUCTION.fullmatch(text)
    return (instructed["problem"] if instructed else text).strip()


def _clean_answer(source: str, row: int, column: str, value: Any) -> str:
    """The ground truth as a bare text.

    A number without a fractional part is written without a point: AI-MO's AMC has its answers, all
    of them integers, as floats.
    """
    if isinstance(value, list) and value:
        return ", ".join(_clean_answer(source, row, column, item) for item in value)
    if value is None or value in ("", []) or value != value:
        text = ""
    elif isinstance(value, str):
        text = unwrap_ground_truth(value)
    elif isinstance(value, float):
        # Beyond 2^53 the digits would be those of the rounding.
        is_whole = value.is_integer() and abs(value) < 2**53
        text = str(int(value)) if is_whole else repr(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        text = str(value)
    else:
        raise ValueError(
            f"data source {source}: row {row} has {value!r:.80} as {column!r}, which is neither "
            "text nor number; name another column with answer=COLUMN."
        )
    if not text:
        raise ValueError(
            f"data source {source}: row {row} has no {column!r}; fill it or remove the row."
        )
    if "####" in text:
        raise ValueError(
            f"data source {source}: row {row} has a worked solution as {column!r} (it contains "
            "####, as GSM8K's do); write what follows #### to a column of its own and name it "
            "with answer=COLUMN."
        )
    return text


def _split_source(source: str) -> tuple[str, str, dict[str, str]]:
    """Split into "file", "hub" or "gym", the name, and the options."""
    name, _, query = source.partition("?")
    kind = next((k for k in ("hub", "gym") if name.startswith(f"{k}:")), "file")
    name = name.removeprefix(f"{kind}:")
    if not name:
        raise ValueError(
            f"data source {source!r}: it names nothing; write PATH, hub:NAME or gym:TASK."
        )
    options: dict[str, str] = {}
    for item in query.split("&") if query else []:
        pair = parse_qsl(item)
        if len(pair) != 1:
            raise ValueError(f"data source {source}: option {item!r} is not of the form key=value.")
        [(key, value)] = pair
        if key in options:
            raise ValueError(f"data source {source}: option {key} occurs twice; keep one.")
        options[key] = value
    allowed = {"file": ("problem", "answer"), "hub": ("problem", "answer", "subset", "split")}
    for key in options:
        if kind != "gym" and key not in allowed[kind]:
            raise ValueError(
                f"data source {source}: unknown option {key!r}; "
                f"{'a file' if kind == 'file' else 'hub:'} takes {', '.join(allowed[kind])}."
            )
    if ("problem" in options) != ("answer" in options):
        given, missing = ("problem", "answer") if "problem" in options else ("answer", "problem")
        if kind != "gym":
            raise ValueError(
                f"data source {source}: {given}= without {missing}=; the two are given together."
            )
    return kind, name, options


@contextlib.contextmanager
def _silence_datasets() -> Iterator[None]:
    """No progress bars and no log lines of `datasets`: what goes wrong is raised."""
    import datasets

    # It tells of every retry without a network.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    verbosity = datasets.utils.logging.get_verbosity()
    has_bars = not datasets.utils.are_progress_bars_disabled()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    if has_bars:
        datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        datasets.utils.logging.set_verbosity(verbosity)
        if has_bars:
            datasets.utils.enable_progress_bars()


def _read_files(source: str, path: Path, options: dict[str, str], cache: str) -> Iterator[_Batch]:
    """Read a file, or the files of a folder in the order of their names."""
    for file in _list_files(source, path):
        if file.suffix == ".parquet":
            schema = _open_file(source, file, cache).features.arrow_schema
            form = _find_form(source, schema, options)
            columns = _list_columns(schema, form)
            rows = _open_file(source, file, cache, columns=columns, batch_size=_BATCH_SIZE)
        else:
            form = None
            rows = _open_file(source, file, cache)
        if rows is None:
            continue
        yield from _read_batches(source, str(file), rows, form, options)


def _open_file(source: str, file: Path, cache: str, **settings: Any) -> Any:
    """Open a file as rows of `datasets`; None where it is empty."""
    import datasets

    try:
        return datasets.load_dataset(
            "parquet" if file.suffix == ".parquet" else "json",
            data_files=str(file),
            split="train",
            # Streaming reads the file itself, where otherwise a copy would be written first.
            streaming=True,
            cache_dir=cache,
            **settings,
        )
    except StopIteration:
        return None
    # `datasets` lets its readers' errors through as they come.
    except (OSError, ValueError, TypeError) as error:
        raise _build_read_error(source, str(file), error) from error


def _build_read_error(source: str, place: str, error: Exception) -> ValueError:
    return ValueError(
        f"data source {source}: cannot read {place}: {_format_error(error)} (rows count from 0). "
        "Mend or replace it."
    )


def _list_files(source: str, path: Path) -> list[Path]:
    """The data files that a path stands for."""
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise ValueError(
                f"data source {source}: {path.suffix or 'no suffix'} is not a kind of data file; "
                f"convert it to one of {', '.join(_SUFFIXES)}."
            )
        return [path]
    if not path.is_dir():
        raise ValueError(
            f"data source {source}: no file or folder {path}; write PATH, hub:NAME or gym:TASK."
        )
    files = sorted(f for f in path.iterdir() if f.suffix in _SUFFIXES and f.is_file())
    if not files:
        raise ValueError(
            f"data source {source}: no {', '.join(_SUFFIXES)} files in the folder; name the folder "
            "that holds them."
        )
    suffixes = sorted({f.suffix for f in files})
    splits = sorted({m[0] for f in files if (m := _SPLIT_NAME.match(f.name))})
    for kinds, what in ((suffixes, "kinds"), (splits, "splits")):
        if len(kinds) > 1:
            raise ValueError(
                f"data source {source}: the folder holds files of several {what}, "
                f"{' and '.join(kinds)}; name one file, or a folder with one of them."
            )
    return files


def _read_hub(source: str, name: str, options: dict[str, str]) -> Iterator[_Batch]:
    """Read a data set of the hub, from the hub's cache where it is there."""
    import datasets

    if Path(name).exists():
        raise ValueError(
            f"data source {source}: {name} is also a path here, which `datasets` would read "
            f"instead; for the path write {name}, for the hub change the working directory."
        )
    for subset in options["subset"].split(",") if "subset" in options else [None]:
        try:
            loaded = datasets.load_dataset(name, name=subset, split=options.get("split"))
        except (OSError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(
                f"data source {source}: cannot be had from the hub, nor is it in its cache "
                f"({_format_error(error)}). Check the name and the network; or download the files "
                "and give their PATH."
            ) from error
        except ValueError as error:
            raise ValueError(
                f"data source {source}: {_format_error(error)}. Choose with subset= and split=."
            ) from error
        if isinstance(loaded, dict):
            if len(loaded) > 1:
                raise ValueError(
                    f"data source {source}: it has the splits {', '.join(loaded)}; choose one with "
                    "split=."
                )
            [loaded] = loaded.values()
        schema = loaded.features.arrow_schema
        form = _find_form(source, schema, options)
        rows = loaded.select_columns(_list_columns(schema, form))
        yield from _read_batches(source, "the download", rows, form, options)


def _format_error(error: Exception) -> str:
    """What a library says, on one line and without a full stop."""
    return (" ".join(str(error).split()) or type(error).__name__).rstrip(".")


def _find_form(source: str, schema: Any, options: dict[str, str]) -> Form:
    """The form of a set: as the options say, or the one of `FORMS` that its columns fit."""
    if "problem" in options:
        for option in ("problem", "answer"):
            if _find_type(schema, options[option]) is None:
                raise ValueError(
                    f"data source {source}: no column {options[option]!r} for {option}=; the "
                    f"columns are {_format_columns(schema)}."
                )
        return Form(
            problem=options["problem"],
            answer=options["answer"],
            is_chat=_is_chat(_find_type(schema, options["problem"])),
            published_as="",
        )
    fitting = [
        form
        for form in FORMS
        if _find_type(schema, form.problem) is not None
        and _find_type(schema, form.answer) is not None
        and (form.beside is None or form.beside in schema.names)
        and _is_chat(_find_type(schema, form.problem)) == form.is_chat
    ]
    if len(fitting) != 1:
        pairs = " or ".join(f"{f.problem} and {f.answer}" for f in fitting)
        raise ValueError(
            f"data source {source}: "
            + (f"the columns fit several known forms, {pairs}" if fitting else "no known form")
            + f"; the columns are {_format_columns(schema)}. Name them with "
            "?problem=COLUMN&answer=COLUMN."
        )
    return fitting[0]


def _format_columns(schema: Any) -> str:
    """Column names, those of structs dotted."""
    import pyarrow

    names: list[str] = []
    for field in schema:
        if pyarrow.types.is_struct(field.type):
            names += [f"{field.name}.{inner.name}" for inner in field.type]
        else:
            names.append(field.name)
    return ", ".join(names)


def _find_type(schema: Any, path: str) -> Any:
    """The arrow type at a dotted path, None where there is none."""
    import pyarrow

    if path in schema.names:
        return schema.field(path).type
    name, *rest = path.split(".")
    if not rest or name not in schema.names:
        return None
    found = schema.field(name).type
    for name in rest:
        if not pyarrow.types.is_struct(found) or found.get_field_index(name) < 0:
            return None
        found = found.field(name).type
    return found


def _is_chat(found: Any) -> bool:
    """Whether an arrow type is a list of turns."""
    import pyarrow

    types = pyarrow.types
    if not (types.is_list(found) or types.is_large_list(found)):
        return False
    turn = found.value_type
    return types.is_struct(turn) and {"role", "content"} <= {field.name for field in turn}


def _list_columns(schema: Any, form: Form) -> list[str]:
    """The columns that are read: the form's, and those that tell what to leave out."""
    wanted = {form.problem, form.problem.split(".")[0], form.answer, form.answer.split(".")[0]}
    wanted |= {"context", "modality", "question_type"}
    return [n for n in schema.names if n in wanted or _IMAGE_COLUMN.fullmatch(n)]


def _read_batches(
    source: str, place: str, rows: Any, form: Form | None, options: dict[str, str]
) -> Iterator[_Batch]:
    """Read the form's columns.

    Args:
        place: of the rows, for people.
        rows: of `datasets`, streamed or not.
        form: None to find it by the columns of the first rows.
    """
    batches = iter(rows.with_format("arrow").iter(_BATCH_SIZE))
    while True:
        try:
            table = next(batches, None)
        # `datasets` lets its readers' errors through as they come.
        except (OSError, ValueError, TypeError) as error:
            raise _build_read_error(source, place, error) from error
        if table is None:
            return
        if form is None:
            form = _find_form(source, table.schema, options)
        problems = _pick(table, form.problem)
        try:
            texts = _read_turns(problems) if form.is_chat else problems.to_pylist()
            answers = _read_values(_pick(table, form.answer))
        # Arrow reads bytes, and finds only now that they are no text.
        except UnicodeDecodeError as error:
            raise ValueError(
                f"data source {source}: {place} is not UTF-8 ({error.reason}); convert it, with "
                "iconv -f LATIN1 -t UTF-8 for example."
            ) from error
        if form.problem == "question" and "context" in table.column_names:
            # OlympiadBench's: what several questions share.
            texts = [
                f"{context}\n{text}" if text and isinstance(context, str) and context else text
                for context, text in zip(table["context"].to_pylist(), texts, strict=True)
            ]
        yield _Batch(
            problems=texts,
            answers=answers,
            problem_column=form.problem,
            answer_column=form.answer,
            omissions=_find_omissions(table),
        )


def _pick(table: Any, path: str) -> Any:
    """The array at a dotted path."""
    import pyarrow.compute

    name, *rest = [path] if path in table.column_names else path.split(".")
    column = table[name].combine_chunks()
    for name in rest:
        column = pyarrow.compute.struct_field(column, name)
    return column


def _read_values(column: Any) -> list[Any]:
    """An array as Python values; `datasets` keeps columns of mixed types as JSON texts."""
    values = column.to_pylist()
    if "arrow.json" in str(column.type):
        return [None if value is None else json.loads(value) for value in values]
    return list(values)


def _read_turns(chats: Any) -> list[Any]:
    """The text of every chat of one user turn, `_Turns` for another."""
    import pyarrow.compute as pc

    turns = chats.flatten()
    num_turns = pc.fill_null(pc.list_value_length(chats), 0)
    are_users = pc.fill_null(pc.equal(pc.struct_field(turns, "role"), "user"), False)
    # One comparison each for a whole batch: a million dicts would take most of the time.
    if pc.all(pc.equal(num_turns, 1)).as_py() and pc.all(are_users).as_py():
        return list(pc.struct_field(turns, "content").to_pylist())
    texts: list[Any] = []
    for chat in chats.to_pylist():
        roles = [str(turn and turn["role"]) for turn in chat or []]
        texts.append(chat[0]["content"] if roles == ["user"] else _Turns(roles))
    return texts


def _find_omissions(table: Any) -> list[str | None] | None:
    """What keeps a row from being a problem in text with an answer: an image, a proof asked for."""

    omissions: list[str | None] = [None] * table.num_rows
    for name in table.column_names:
        if not _IMAGE_COLUMN.fullmatch(name):
            continue
        for row, is_there in enumerate(_are_filled(table[name].combine_chunks())):
            if is_there:
                omissions[row] = "image"
    for name, value, omission in (
        ("modality", "multimodal", "image"),
        ("question_type", "theorem proof", "proof"),
    ):
        if name in table.column_names:
            for row, found in enumerate(table[name].to_pylist()):
                if isinstance(found, str) and found.lower() == value:
                    omissions[row] = omissions[row] or omission
    return omissions if any(omissions) else None


def _are_filled(column: Any) -> list[bool]:
    """Where an array holds neither null nor an empty list or text."""
    import pyarrow
    import pyarrow.compute as pc

    types = pyarrow.types
    filled = pc.is_valid(column)
    if types.is_list(column.type) or types.is_large_list(column.type):
        filled = pc.greater(pc.list_value_length(column), 0)
    elif types.is_string(column.type) or types.is_large_string(column.type):
        filled = pc.greater(pc.binary_length(column), 0)
    return list(pc.fill_null(filled, False).to_pylist())
