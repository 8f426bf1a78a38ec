"""Benchmarks: sample, judge, keep every sample, and say how sure the mean is.

The trainer and `stapo eval` run the same code. A sample is a function of the weights, the settings,
the seed and its place (benchmark, row, number), so that an evaluation that was interrupted goes on
where it stopped and comes to the same table.
"""
