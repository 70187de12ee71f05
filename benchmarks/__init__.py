"""Benchmarks: how many times faster seqdefer is than other ways to the same results, as ratios within one run.

    python -m benchmarks            # about 25 minutes on two cores; prints a table and writes bench.json
    python -m benchmarks --quick    # smaller sizes, a few minutes
    python -m benchmarks --help

`measure` times and compares; the other modules hold the benchmarks. By default all data and models are synthetic.
"""
