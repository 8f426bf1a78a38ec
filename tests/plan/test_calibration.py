"""The plan against published figures; `pytest -s` prints the table that docs/plan.md has."""

from pathlib import Path

from tests.plan.published import compute_figures, compute_verl_235b_memory

DOCS = Path(__file__).parents[2] / "docs/plan.md"


def test_errors_against_published_figures_are_bounded_and_documented():
    figures = compute_figures()
    print()
    for figure in figures:
        print(figure.row)
    held = [figure for figure in figures if figure.bound is not None]
    assert len(held) >= 8
    for figure in held:
        assert abs(figure.error) <= figure.bound, figure.row
    documented = DOCS.read_text()
    for figure in figures:
        assert figure.row in documented


def test_235b_fits_the_128_h20_that_verl_trains_it_on():
    assert 0.5 < compute_verl_235b_memory(128) < 0.9
