from megatron_stapo.observability.resumption import Row, format_rows


def build_row(second: str = "a", difference: float = 0.0, bound: float = 0.0, **changes) -> Row:
    values = {"what": "loss", "first": "a", "may_differ": False} | changes
    return Row(second=second, difference=difference, bound=bound, **values)


def test_equal_bits_are_asked_for_unless_a_bound_is_given() -> None:
    assert build_row().passed
    assert not build_row("b", 1e-9).passed
    assert build_row("b", 1e-3, 1e-3).passed
    assert not build_row("b", 2e-3, 1e-3).passed
    assert not build_row("b", float("inf"), 1e-3).passed
    assert build_row("b", 1.0, may_differ=True).passed


def test_the_table_gives_bounds_and_counts_the_rows_that_differ() -> None:
    rows = [build_row(), build_row("b", 0.5, 1e-3), build_row("b", 1.0, may_differ=True)]
    lines = format_rows(rows, 4, 2).splitlines()
    assert lines[0].split("  ")[0] == "after step 4"
    assert [line.split()[-3:] for line in lines[1:-1]] == [
        ["0", "equal", "ok"],
        ["0.5", "1e-03", "FAILED"],
        ["-", "-", "ok"],
    ]
    assert lines[-1] == "2 steps, a kill and 2 more are NOT the same as 4 steps: 1 rows differ"
    assert format_rows(rows[:1], 4, 2).endswith(
        "2 steps, a kill and 2 more are the same as 4 steps"
    )
