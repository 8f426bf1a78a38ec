import pytest

from megatron_stapo.data.benchmarks import BENCHMARKS
from megatron_stapo.evaluation.paper import (
    METHODS,
    PRESETS,
    SIX_BENCHMARKS,
    find_paper_cell,
    find_scale,
)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", ["1.7B", "8B", "14B"])
def test_the_averages_are_those_of_the_cells(scale, method, preset):
    """A slip of the pen in a cell would show, but for the one average that the paper misprints."""
    setting = PRESETS[preset]

    def find(benchmark):
        cell = find_paper_cell(scale, method, benchmark, setting.temperature, setting.top_p)
        return cell.first

    mean = sum(find(benchmark) for benchmark in SIX_BENCHMARKS) / 6
    if (scale, method, preset) == ("14B", "STAPO", "training"):
        assert mean == pytest.approx(64.91, abs=0.01)
        assert find("average") == 64.38
    else:
        assert find("average") == pytest.approx(mean, abs=0.011)


def test_the_late_gains_are_the_papers():
    """18.49, 5.78 and 10.20 % over the strongest baseline, as the abstract's figures have it."""
    gains = []
    for scale in ("1.7B", "8B", "14B"):
        averages = {m: find_paper_cell(scale, m, "average", 1.0, 1.0).late for m in METHODS}
        best = max(value for method, value in averages.items() if method != "STAPO")
        gains.append(100 * (averages["STAPO"] / best - 1))
    assert gains == pytest.approx([18.49, 5.78, 10.20], abs=0.01)


def test_a_number_is_given_only_where_the_paper_has_one():
    assert find_paper_cell("1.7B", "STAPO", "aime24", 1.0, 1.0).late == 18.44
    assert find_paper_cell("1.7B", "STAPO", "aime24", 0.7, 0.9).late is None
    for place in ((None, "aime24", 1.0, 1.0), ("8B", "own", 1.0, 1.0), ("8B", "amc23", 0.6, 0.9)):
        scale, benchmark, temperature, top_p = place
        cell = find_paper_cell(scale, "STAPO", benchmark, temperature, top_p)
        assert cell.late is None and cell.first is None


def test_the_scale_follows_from_the_width():
    assert [find_scale(size) for size in (192, 2048, 4096, 5120)] == [None, "1.7B", "8B", "14B"]


def test_the_papers_benchmarks_are_ours():
    assert tuple(BENCHMARKS) == SIX_BENCHMARKS
