import json
import sys

import pyarrow
import pyarrow.parquet
import pytest

from megatron_stapo.data.gym import GYM_PARTS, compute_part
from megatron_stapo.data.sources import FORMS, load_problems
from tests.data import published
from tests.data.published import write_jsonl, write_parquet


def load_pairs(source, **settings):
    problems, _ = load_problems(str(source), **settings)
    return [(p.problem, p.answer) for p in problems]


@pytest.fixture
def write(tmp_path):
    """Writes rows to a JSONL file."""

    def write(*rows, name="set.jsonl"):
        return write_jsonl(tmp_path / name, rows)

    return write


# Published forms.


def test_dapo_as_published_is_bare_english_and_single(tmp_path):
    path = published.write_dapo(tmp_path / "dapo.parquet", num_problems=25, num_copies=12)
    problems, report = load_problems(str(path), drop_chinese=True)
    assert len(problems) == report.num_problems == 20
    assert (report.num_rows, report.num_duplicates, report.num_chinese) == (300, 275, 5)
    assert report.num_conflicting == 0
    assert problems[0].problem == "Solve $x + 0 = 0$." + " Here $x$ is a number." * 10
    assert [(p.row, p.answer) for p in problems[3:6]] == [(3, "3"), (5, "5"), (6, "6")]
    assert report.format() == (
        f"{path}: 20 problems of 300 rows; left out: 275 duplicates, 5 in Chinese"
    )


def test_dapo_keeps_its_chinese_problems_unless_told(tmp_path):
    path = write_parquet(tmp_path / "dapo.parquet", published.build_dapo_rows(5, 2))
    assert load_pairs(path)[4] == ("若 $x + 4 = 8$,求 $x$ 的值。", "4")


def test_the_copies_of_a_benchmark_are_duplicates(tmp_path):
    path = write_parquet(tmp_path / "aime-2024.parquet", published.build_aime_2024_rows())
    problems, report = load_problems(str(path))
    assert report.num_rows == 960 and report.num_duplicates == 930
    assert [p.problem for p in problems[:2]] == ["Find $m + 0$.", "Find $m + 1$."]
    problems, report = load_problems(str(path), keep_duplicates=True)
    assert report.num_problems == 960 and report.num_duplicates == 0
    assert [p.row for p in problems] == list(range(960))


def test_the_boxed_answers_of_justrls_aime24_are_unwrapped(tmp_path):
    rows = published.build_justrl_rows("AIME24", [r"\boxed{204}", r" \boxed{\frac{1}{2}} "])
    path = write_parquet(tmp_path / "test.parquet", rows)
    assert load_pairs(path) == [
        ("Problem 0 of AIME24?", "204"),
        ("Problem 1 of AIME24?", r"\frac{1}{2}"),
    ]


def test_justrls_extra_columns_do_not_matter(tmp_path):
    rows = published.build_justrl_rows("MATH-500", ["x^2"])
    path = write_parquet(
        tmp_path / "test.parquet", [{**row, "source": "MATH", "id": "test/1.json"} for row in rows]
    )
    assert load_pairs(path) == [("Problem 0 of MATH-500?", "x^2")]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "json"])
@pytest.mark.parametrize(
    ("rows", "first"),
    [
        (published.build_processed_rows(), ("Solve $y = 0$.", "0")),
        (published.build_aime24_rows(), ("Find $a_0$.", "00")),
        (published.build_aime25_rows("I"), ("Part I: find $b_0$.", "0")),
        (
            published.build_math500_rows(),
            (
                "Write $(1,1)$ in polar coordinates.",
                r"\left( \sqrt{2}, \frac{\pi}{4} \right)",
            ),
        ),
        (published.build_aimo_amc_rows(), ("How many are 0?", "0")),
        (published.build_amc23_rows(), ("How many are 0?", "0")),
        (published.build_minerva_rows(), ("How bright is the star, in erg/s?", "4.5e33")),
        (published.build_dapo_rows(1, 1), ("Solve $x + 0 = 0$.", "0")),
    ],
    ids=["processed", "aime24", "aime25", "math500", "aimo", "amc23", "minerva", "dapo"],
)
def test_published_forms_are_recognised(tmp_path, rows, first, suffix):
    path = tmp_path / f"set.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        (write_jsonl if suffix == "jsonl" else write_parquet)(path, rows)
    pairs = load_pairs(path)
    assert pairs[0] == first
    assert len(pairs) == len(rows)


@pytest.mark.parametrize("write_rows", [write_jsonl, write_parquet])
def test_olympiadbench_joins_answers_and_leaves_out_images_and_proofs(tmp_path, write_rows):
    rows = published.build_olympiad_rows()
    for row in rows if write_rows is write_jsonl else []:
        row["image_1"] = row["image_1"] and "2.png"
    path = write_rows(tmp_path / ("o.jsonl" if write_rows is write_jsonl else "o.parquet"), rows)
    problems, report = load_problems(str(path))
    assert [(p.row, p.problem, p.answer) for p in problems] == [
        (0, "Determine all integers of kind 0.", "(1,8), (2,7)"),
        (1, "Let $n$ be odd.\nDetermine all integers of kind 1.", "1"),
    ]
    assert (report.num_images, report.num_proofs) == (1, 1)
    assert report.format().endswith("left out: 1 with an image, 1 that ask for a proof")


def test_every_form_says_where_it_is_published():
    assert all(form.published_as for form in FORMS)


# Columns.


def test_named_columns_reach_into_structs_and_pass_by_the_form(write):
    path = write(
        {"problem": "wrong", "answer": "0", "q": {"text": "right"}, "gold": {"a": {"b": 7}}}
    )
    assert load_pairs(f"{path}?problem=q.text&answer=gold.a.b") == [("right", "7")]


def test_a_named_column_may_hold_a_chat(write):
    path = write({"messages": published.ask_user("What?"), "gold": "7"})
    assert load_pairs(f"{path}?problem=messages&answer=gold") == [("What?", "7")]


def test_a_column_with_a_dot_in_its_name_is_found(write):
    path = write({"a.q": "What?", "gold": "7"})
    assert load_pairs(f"{path}?problem=a.q&answer=gold") == [("What?", "7")]


def test_answers_of_mixed_types_are_read(write):
    rows = [{"problem": f"p{i}", "answer": a} for i, a in enumerate([204, "1/2", 2.5, [1, "x"]])]
    assert [a for _, a in load_pairs(write(*rows))] == ["204", "1/2", "2.5", "1, x"]


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (204, "204"),
        (204.0, "204"),
        (0.5, "0.5"),
        (4.5e33, "4.5e+33"),
        (" 7 ", "7"),
        (r"\boxed{7}", "7"),
        (r"$\boxed{7}$", "7"),
        ("$x^2$", "x^2"),
        (r"\boxed{\boxed{ 7 }}", "7"),
        (r"\boxed{1}, \boxed{2}", r"\boxed{1}, \boxed{2}"),
        (r"x = \boxed{7}", r"x = \boxed{7}"),
        (r"\boxed{7", r"\boxed{7"),
        (["1", r"\boxed{2}"], "1, 2"),
        (-3, "-3"),
    ],
)
def test_answers_come_out_bare(write, value, answer):
    assert load_pairs(write({"problem": "p", "answer": value})) == [("p", answer)]


# The instruction of DAPO.


@pytest.mark.parametrize(
    "text",
    [
        published.DAPO_TEMPLATE.format("A\n\nproblem."),
        "\n"
        + published.DAPO_TEMPLATE.format("  A\n\nproblem.\n").replace(" of ", "  of\n")
        + " \n",
    ],
)
def test_the_instruction_is_taken_off(write, text):
    assert load_pairs(write({"problem": text, "answer": "1"})) == [("A\n\nproblem.", "1")]


@pytest.mark.parametrize(
    "text",
    [
        "Solve the following math problem step by step. What is 1 + 1?",
        'What is 1 + 1? Remember to put your answer on its own line after "Answer:".',
        "He wrote: " + published.DAPO_TEMPLATE.format("1 + 1"),
    ],
)
def test_a_problem_that_mentions_the_instruction_stays(write, text):
    assert load_pairs(write({"problem": text, "answer": "1"})) == [(text, "1")]


# Duplicates and Chinese.


def test_duplicates_are_judged_by_the_clean_text_and_conflicts_counted(write):
    path = write(
        {"problem": "Find x.", "answer": "1"},
        {"problem": " Find \n x.", "answer": r"\boxed{1}"},
        {"problem": published.DAPO_TEMPLATE.format("Find x."), "answer": "2"},
        {"problem": "Find y.", "answer": "3"},
        {"problem": "Find x.", "answer": "4"},
    )
    problems, report = load_problems(str(path))
    assert [(p.row, p.problem, p.answer) for p in problems] == [
        (0, "Find x.", "1"),
        (3, "Find y.", "3"),
    ]
    assert (report.num_duplicates, report.num_conflicting) == (3, 2)
    assert "3 duplicates (2 of them with another answer)" in report.format()
    assert load_pairs(path, keep_duplicates=True) == [
        ("Find x.", "1"),
        ("Find \n x.", "1"),
        ("Find x.", "2"),
        ("Find y.", "3"),
        ("Find x.", "4"),
    ]


def test_every_row_counts_once(write):
    path = write(*[{"problem": p, "answer": "1"} for p in ("a", "b", "求 x", "a", "求 x", "é ü π")])
    for keep in (True, False):
        _, report = load_problems(str(path), keep_duplicates=keep, drop_chinese=True)
        left_out = report.num_duplicates + report.num_chinese
        assert report.num_rows == report.num_problems + left_out == 6
    assert (report.num_duplicates, report.num_chinese, report.num_problems) == (2, 1, 3)


def test_nothing_left_out_makes_a_short_line(write):
    path = write({"problem": "a", "answer": "1"})
    assert load_problems(str(path))[1].format() == f"{path}: 1 problems"


# Files and folders.


def test_the_files_of_a_folder_are_read_by_name_and_rows_count_on(write, tmp_path):
    write({"problem": "b", "answer": "1"}, name="train-2.jsonl")
    write({"problem": "a", "answer": "2"}, {"problem": "c", "answer": "3"}, name="train-1.jsonl")
    (tmp_path / "README.md").write_text("ours")
    problems, _ = load_problems(str(tmp_path))
    assert [(p.row, p.problem) for p in problems] == [(0, "a"), (1, "c"), (2, "b")]


def test_nothing_is_written_and_the_settings_of_datasets_are_restored(tmp_path, monkeypatch):
    import datasets

    path = write_parquet(tmp_path / "dapo.parquet", published.build_dapo_rows(3, 1))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    verbosity = datasets.utils.logging.get_verbosity()
    load_problems(str(path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dapo.parquet"]
    assert datasets.utils.logging.get_verbosity() == verbosity
    assert not datasets.utils.are_progress_bars_disabled()


def test_importing_the_module_is_cheap():
    import subprocess

    code = (
        "import sys, megatron_stapo.data.sources, megatron_stapo.data.benchmarks; "
        "print(sorted({'torch', 'transformers', 'datasets', 'reasoning_gym'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"problem": "a", "answer": "1"}\n{"problem": "b" "answer": 2}\n', "in row 1"),
        ("1\n2\n", "cannot read"),
        ("", "it has no rows"),
        ('{"problem": "a", "solution": "1"}', "no known form; the columns are problem, solution"),
        ('{"problem": "a", "answer": " "}', "row 0 has no 'answer'"),
        ('{"problem": "a", "answer": "1"}\n{"problem": "b"}', "row 1 has no 'answer'"),
        ('{"problem": "a", "answer": NaN}', "row 0 has no 'answer'"),
        ('{"problem": "a", "answer": []}', "row 0 has no 'answer'"),
        ('{"problem": "a", "answer": ["1", null]}', "row 0 has no 'answer'"),
        ('{"problem": "a", "answer": "\\\\boxed{}"}', "row 0 has no 'answer'"),
        ('{"problem": " ", "answer": "1"}', "row 0 has no 'problem'"),
        ('{"problem": 7, "answer": "1"}', "row 0 has 7 as 'problem', which is no text"),
        ('{"problem": "a", "answer": true}', "neither text nor number"),
        ('{"problem": "a", "answer": {"b": 1}}', "neither text nor number"),
        ('{"question": "a", "answer": "So 7\\n#### 7"}', "worked solution"),
        (
            '{"problem": "a", "question": "b", "answer": "1"}',
            "fit several known forms, problem and answer or question and answer",
        ),
        (
            '{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], '
            '"reward_model": {"ground_truth": "1"}}',
            "row 0 has the turns system, user as 'prompt'",
        ),
        ('{"prompt": [], "solution": "1", "source_prompt": []}', "row 0 has [] as 'prompt'"),
        (
            '{"problem": "a", "answer": "1"}\n' * 2 + '{"problem": "a", "answer": null}',
            "row 2 has no 'answer'",
        ),
        (
            '{"question": "a", "final_answer": ["1"], "question_type": "Theorem proof"}',
            "0 problems of 1 rows; left out: 1 that ask for a proof; none is left",
        ),
    ],
)
def test_bad_files_are_refused_by_place_and_remedy(tmp_path, text, message):
    path = tmp_path / "set.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        load_problems(str(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_change_of_type_beyond_the_first_chunk_is_refused_with_the_file(tmp_path):
    path = tmp_path / "set.jsonl"
    filler = "x" * 10_000
    rows = [{"problem": f"{i} {filler}", "answer": i} for i in range(1500)]
    write_jsonl(path, [*rows, {"problem": "last", "answer": "1/2"}])
    with pytest.raises(ValueError, match=r"cannot read .*set\.jsonl"):
        load_problems(str(path))


def test_a_broken_parquet_is_refused_with_its_name(tmp_path):
    (tmp_path / "a.parquet").write_text("not parquet")
    with pytest.raises(ValueError, match=r"cannot read .*a\.parquet: .* Mend or replace it"):
        load_problems(str(tmp_path))


def test_a_truncated_parquet_is_refused(tmp_path):
    path = published.write_dapo(tmp_path / "dapo.parquet", num_problems=50, num_copies=4)
    data = path.read_bytes()
    path.write_bytes(data[:400] + b"\0" * 400 + data[800:])
    with pytest.raises(ValueError, match=r"cannot read .*dapo\.parquet"):
        load_problems(str(path))


def test_an_empty_parquet_is_refused(tmp_path):
    table = pyarrow.table(
        {"problem": pyarrow.array([], "string"), "answer": pyarrow.array([], "string")}
    )
    pyarrow.parquet.write_table(table, tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match="it has no rows; name one with problems"):
        load_problems(str(tmp_path / "empty.parquet"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "it names nothing"),
        ("hub:", "it names nothing"),
        ("nowhere.jsonl", "no file or folder nowhere.jsonl; write PATH, hub:NAME or gym:TASK"),
        ("notes.txt", r".txt is not a kind of data file"),
        ("set.jsonl?problem", "option 'problem' is not of the form key=value"),
        ("set.jsonl?problem=a&problem=b", "option problem occurs twice"),
        ("set.jsonl?split=test", "unknown option 'split'; a file takes problem, answer"),
        ("hub:a/b?size=3", "unknown option 'size'; hub: takes problem, answer, subset, split"),
        ("set.jsonl?problem=a", "problem= without answer="),
        (
            "set.jsonl?problem=a&answer=b",
            "no column 'a' for problem=; the columns are problem, m.x",
        ),
        ("set.jsonl?problem=problem&answer=m.y", "no column 'm.y' for answer="),
    ],
)
def test_bad_sources_are_refused(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    write_jsonl(tmp_path / "set.jsonl", [{"problem": "a", "m": {"x": "1"}}])
    with pytest.raises(ValueError) as caught:
        load_problems(source)
    assert message in str(caught.value)
    assert str(caught.value).startswith("data source ")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.jsonl", "b.parquet"], "files of several kinds, .jsonl and .parquet"),
        (["test.jsonl", "train.jsonl"], "files of several splits, test and train"),
        (["notes.md"], "no .jsonl, .json, .parquet files in the folder"),
    ],
)
def test_folders_that_mix_or_hold_nothing_are_refused(tmp_path, names, message):
    for name in names:
        (tmp_path / name).write_text('{"problem": "a", "answer": "1"}')
    with pytest.raises(ValueError) as caught:
        load_problems(str(tmp_path))
    assert message in str(caught.value)


# The hub, its data sets in a folder.


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Serves hub:ours/NAME from files; `datasets` does the rest."""
    import datasets

    load_dataset = datasets.load_dataset

    def load(path, name=None, **settings):
        return load_dataset(
            str(tmp_path / path), name, cache_dir=str(tmp_path / "cache"), **settings
        )

    def publish(name, files, configs=None):
        folder = tmp_path / "ours" / name
        folder.mkdir(parents=True)
        for file, rows in files.items():
            write_jsonl(folder / file, rows)
        if configs:
            lines = "".join(
                f"- config_name: {c}\n  data_files:\n  - split: test\n    path: {f}\n"
                for c, f in configs.items()
            )
            (folder / "README.md").write_text(f"---\nconfigs:\n{lines}---\n")

    monkeypatch.setattr(datasets, "load_dataset", load)
    return publish


def test_subsets_are_read_one_after_another(hub):
    hub(
        "AIME2025",
        {f"{c}.jsonl": published.build_aime25_rows(c) for c in ("I", "II")},
        {f"AIME2025-{c}": f"{c}.jsonl" for c in ("I", "II")},
    )
    problems, report = load_problems("hub:ours/AIME2025?subset=AIME2025-I,AIME2025-II&split=test")
    assert [(p.row, p.problem) for p in problems] == [
        (0, "Part I: find $b_0$."),
        (1, "Part I: find $b_1$."),
        (2, "Part II: find $b_0$."),
        (3, "Part II: find $b_1$."),
    ]
    assert report.num_rows == 4
    with pytest.raises(ValueError, match=r"AIME2025-I.*subset="):
        load_problems("hub:ours/AIME2025")
    with pytest.raises(ValueError, match=r"'III' not found.*subset="):
        load_problems("hub:ours/AIME2025?subset=III")
    with pytest.raises(ValueError, match=r"\"dev\".*split="):
        load_problems("hub:ours/AIME2025?subset=AIME2025-I&split=dev")


def test_the_only_split_needs_no_name_and_of_several_one_is_chosen(hub):
    hub("one", {"train.jsonl": published.build_aime24_rows()})
    assert len(load_pairs("hub:ours/one")) == 3
    hub("two", {f"{s}.jsonl": published.build_aime24_rows() for s in ("train", "test")})
    assert len(load_pairs("hub:ours/two?split=test")) == 3
    with pytest.raises(ValueError, match="it has the splits train, test; choose one with split="):
        load_problems("hub:ours/two")


def test_a_hub_that_is_not_there_is_one_error_with_the_remedy(monkeypatch):
    import datasets

    def fail(*_, **__):
        raise ConnectionError("Couldn't reach 'a/b' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError, match=r"hub:a/b: cannot be had .* download the files and give"):
        load_problems("hub:a/b")


def test_a_hub_name_that_is_a_folder_here_is_refused(tmp_path, monkeypatch):
    (tmp_path / "ours" / "set").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"hub:ours/set: ours/set is also a path here"):
        load_problems("hub:ours/set")


# Procedural problems.

CHAIN = "gym:chain_sum?min_terms=2&max_terms=4&max_digits=2"


def test_a_gym_source_is_deterministic_and_its_problems_distinct():
    problems, report = load_problems(f"{CHAIN}&size=200")
    assert load_problems(f"{CHAIN}&size=200")[0] == problems
    assert len({p.problem for p in problems}) == report.num_problems == report.num_rows == 200
    for p in problems:
        start, expression = p.problem.removesuffix(" =").split(": ")
        assert start == "State the final answer to the following arithmetic problem"
        assert str(eval(expression)) == p.answer


def test_a_smaller_size_is_the_beginning_of_a_larger():
    assert load_problems(f"{CHAIN}&size=20")[0] == load_problems(f"{CHAIN}&size=90")[0][:20]


def test_the_problems_are_reasoning_gyms_own():
    from reasoning_gym.factory import create_dataset

    own = create_dataset("chain_sum", min_terms=2, max_terms=4, max_digits=2, seed=0, size=100)
    rows = {(e["question"], e["answer"]) for e in own if compute_part(e["question"]) == "train"}
    assert rows <= set(load_pairs(f"{CHAIN}&size=100"))


def test_parts_never_share_a_question_and_seeds_differ():
    drawn = {
        (part, seed): {p for p, _ in load_pairs(f"{CHAIN}&size=300&part={part}&seed={seed}")}
        for part in GYM_PARTS
        for seed in (0, 1)
    }
    for (part, seed), questions in drawn.items():
        for other, more in drawn.items():
            if other[0] != part:
                assert not questions & more
        # reasoning-gym itself would have all but one in common.
        assert len(questions & drawn[part, 1 - seed]) < 100
    assert load_pairs(f"{CHAIN}&size=5") == load_pairs(f"{CHAIN}&size=5&part=train")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gym:chain_sums", "no task 'chain_sums'. Did you mean chain_sum"),
        ("gym:zzzzzz", "It has ab, acre"),
        ("gym:chain_sum?min_term=2", "no parameter 'min_term'. Did you mean min_terms"),
        ("gym:chain_sum?min_terms=two", "min_terms=two: must be a whole number"),
        ("gym:chain_sum?allow_negation=1", "allow_negation=1: must be true or false"),
        ("gym:chain_sum?min_terms=9", "max_terms must be >= min_terms"),
        ("gym:chain_sum?size=0", "size=0: must be a whole number of at least 1"),
        ("gym:chain_sum?seed=-1", "seed=-1: must be a whole number of at least 0"),
        ("gym:chain_sum?part=test", "part=test: not one of pretrain, train, heldout"),
        ("gym:chain_sum?max_terms=2&max_digits=1", "distinct problems in the part train"),
    ],
)
def test_bad_gym_sources_are_refused(source, message):
    with pytest.raises(ValueError) as caught:
        load_problems(source)
    assert message in str(caught.value)
    assert source in str(caught.value)


def test_gym_parameters_are_read_by_their_declared_type():
    pairs = load_pairs("gym:chain_sum?allow_negation=True&size=50")
    assert any("-" in p.split(": ")[1].split()[0] for p, _ in pairs)
