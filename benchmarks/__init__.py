"""How fast seqdefer is: each row one run's ratio of the naive way's time to ours, with the same results.

    python -m benchmarks            # under five minutes on two cores; the table, and bench.json
    python -m benchmarks --quick    # under a minute, smaller sizes
    python -m benchmarks --help

`measure` times and compares, `weather` holds the benchmarks. They need nothing else: a temperature record is made on
the spot.
"""
