"""Files with the schemas of published data sets, and problems of our own.

python tests/data/published.py FOLDER    # DAPO-Math-17k at its published size, 1.8 M rows
"""

import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet

DAPO_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    '{}\n\nRemember to put your answer on its own line after "Answer:".'
)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def ask_user(text):
    return [{"content": text, "role": "user"}]


def build_dapo_rows(num_problems, num_copies):
    """DAPO-Math-17k: every problem in every copy of the whole, each fifth one in Chinese."""
    rows = []
    for i in range(num_problems):
        text = (
            f"若 $x + {i} = {2 * i}$,求 $x$ 的值。" if i % 5 == 4 else f"Solve $x + {i} = {2 * i}$."
        )
        rows.append(
            {
                "data_source": "math_dapo",
                "prompt": ask_user(DAPO_TEMPLATE.format(text)),
                "ability": "MATH",
                "reward_model": {"ground_truth": str(i), "style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": f"id-{i}"},
            }
        )
    return [{**row, "__index_level_0__": i} for i, row in enumerate(rows * num_copies)]


def write_dapo(path, num_problems, num_copies):
    """Write DAPO-Math-17k with copies by the hundred, a copy at a time."""
    writer = None
    # A page of text to each problem, as long as the published ones are.
    rows = build_dapo_rows(num_problems, 1)
    for row in rows:
        row["prompt"][0]["content"] = row["prompt"][0]["content"].replace(
            "\n\nRemember", " Here $x$ is a number." * 10 + "\n\nRemember"
        )
    table = pyarrow.Table.from_pylist(rows)
    for _ in range(num_copies):
        writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table, row_group_size=num_problems)
    writer.close()
    return path


def build_aime_2024_rows(num_problems=30, num_copies=32):
    """BytedTsinghua-SIA/AIME-2024."""
    return [
        {
            "data_source": "math_dapo",
            "prompt": ask_user(DAPO_TEMPLATE.format(f"Find $m + {i}$.")),
            "ability": "MATH",
            "reward_model": {"ground_truth": str(i), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": i, "raw_problem": f"Find $m + {i}$.", "split": "test"},
        }
        for _ in range(num_copies)
        for i in range(num_problems)
    ]


def build_justrl_rows(name, answers):
    """data/NAME/test.parquet of JustRL."""
    return [
        {
            "data_source": name,
            "prompt": ask_user(f"Problem {i} of {name}?"),
            "ability": "math",
            "reward_model": {"ground_truth": answer, "style": "rule"},
            "extra_info": {"index": f"{name}-{i}", "split": "test"},
        }
        for i, answer in enumerate(answers)
    ]


def build_processed_rows():
    """open-r1/DAPO-Math-17k-Processed."""
    return [
        {
            "prompt": f"Solve $y = {i}$.",
            "solution": str(i),
            "data_source": "math_dapo",
            "source_prompt": ask_user(DAPO_TEMPLATE.format(f"Solve $y = {i}$.")),
            "ability": "MATH",
            "reward_model": {"ground_truth": str(i), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"id-{i}"},
        }
        for i in range(3)
    ]


def build_aime24_rows():
    """HuggingFaceH4/aime_2024."""
    return [
        {
            "id": 60 + i,
            "problem": f"Find $a_{i}$.",
            "solution": f"It is $\\boxed{{0{i}}}$.",
            "answer": f"0{i}",
            "url": "https://example.org",
            "year": "2024",
        }
        for i in range(3)
    ]


def build_aime25_rows(part):
    """opencompass/AIME2025, configurations AIME2025-I and -II."""
    return [{"question": f"Part {part}: find $b_{i}$.", "answer": str(i)} for i in range(2)]


def build_math500_rows():
    """HuggingFaceH4/MATH-500."""
    return [
        {
            "problem": "Write $(1,1)$ in polar coordinates.",
            "solution": "So \\boxed{(\\sqrt2, \\frac{\\pi}{4})}.",
            "answer": "\\left( \\sqrt{2}, \\frac{\\pi}{4} \\right)",
            "subject": "Precalculus",
            "level": 2,
            "unique_id": "test/precalculus/1.json",
        }
    ]


def build_aimo_amc_rows():
    """AI-MO/aimo-validation-amc: answers are floats."""
    return [
        {"id": i, "problem": f"How many are {i}?", "answer": float(i), "url": "https://example.org"}
        for i in range(3)
    ]


def build_amc23_rows():
    """math-ai/amc23."""
    return [
        {"id": i, "question": f"How many are {i}?", "answer": str(i), "url": "https://example.org"}
        for i in range(3)
    ]


def build_minerva_rows():
    """math-ai/minervamath."""
    return [{"question": "How bright is the star, in erg/s?", "answer": "4.5e33"}]


def build_olympiad_row(i, **changes):
    """Hothan/OlympiadBench."""
    return {
        "id": i,
        "question": f"Determine all integers of kind {i}.",
        "solution": ["A long one."],
        "final_answer": ["$1$"],
        "context": None,
        "image_1": None,
        "image_2": None,
        "modality": "Text-only",
        "difficulty": "Competition",
        "is_multiple_answer": False,
        "unit": None,
        "answer_type": "Numerical",
        "error": None,
        "question_type": "Open-ended",
        "subfield": "Number Theory",
        "subject": "Math",
        "language": "English",
    } | changes


def build_olympiad_rows():
    """Two problems, one of several answers and one with a context; an image; a proof."""
    return [
        build_olympiad_row(0, final_answer=["$(1,8)$", "$(2,7)$"], is_multiple_answer=True),
        build_olympiad_row(1, context="Let $n$ be odd."),
        build_olympiad_row(2, image_1={"bytes": b"png", "path": "2.png"}, modality="Multimodal"),
        build_olympiad_row(3, final_answer=None, question_type="Theorem proof"),
    ]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    print(write_dapo(folder / "dapo-math-17k.parquet", 17_917, 100))
