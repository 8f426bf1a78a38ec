import pytest

from megatron_stapo.data.benchmarks import BENCHMARKS, check_size, resolve_benchmark


def test_a_name_stands_for_its_hub_copy():
    assert resolve_benchmark("aime24") == ("aime24", "hub:HuggingFaceH4/aime_2024?split=train")


@pytest.mark.parametrize(
    ("text", "name", "source"),
    [
        ("aime24=data/aime24.parquet", "aime24", "data/aime24.parquet"),
        ("mine=gym:chain_sum?size=9", "mine", "gym:chain_sum?size=9"),
        ("minerva=a/b.jsonl?problem=q&answer=a", "minerva", "a/b.jsonl?problem=q&answer=a"),
        ("data/amc.jsonl", "amc", "data/amc.jsonl"),
        ("data/AIME24/test.parquet", "aime24", "data/AIME24/test.parquet"),
        ("test.parquet", "test", "test.parquet"),
        ("a/b.jsonl?problem=q&answer=a", "b", "a/b.jsonl?problem=q&answer=a"),
        ("hub:math-ai/amc23?split=test", "amc23", "hub:math-ai/amc23?split=test"),
        ("gym:chain_sum?size=9&part=heldout", "chain_sum", "gym:chain_sum?size=9&part=heldout"),
    ],
)
def test_a_source_is_named_by_the_user_or_after_itself(text, name, source):
    assert resolve_benchmark(text) == (name, source)


def test_a_folder_is_a_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sets").mkdir()
    assert resolve_benchmark("sets") == ("sets", "sets")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("aime_24", "benchmark aime_24: unknown. Did you mean aime24"),
        ("AIME24", "Did you mean aime24"),
        ("gsm8k", "benchmark gsm8k: unknown. Benchmarks: aime24, aime25, amc23, math500"),
        ("aime24=", "or NAME=SOURCE."),
        ("", "unknown"),
    ],
)
def test_a_typo_is_refused_with_the_close_names(text, message):
    with pytest.raises(ValueError) as caught:
        resolve_benchmark(text)
    assert message in str(caught.value)


def test_the_paper_samples_small_sets_32_times_and_large_ones_4_times():
    assert {b.name: b.paper_num_samples for b in BENCHMARKS.values()} == {
        "aime24": 32,
        "aime25": 32,
        "amc23": 32,
        "math500": 4,
        "minerva": 4,
        "olympiadbench": 4,
    }


def test_another_size_is_told():
    assert check_size("amc23", 40) is None
    assert check_size("mine", 7) is None
    assert "83 problems, where the paper's copy has 40" in check_size("amc23", 83)
    assert "benchmark olympiadbench: 675" in check_size("olympiadbench", 675)
