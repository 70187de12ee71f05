"""Labelling: cut a task into jobs, run them with any number of workers, and keep the results in shards.

    hand_offs.py    hand-off tables, for one-time deferral
    branches.py     all hand-offs of a draft in one pass
    trees.py        decision trees, for token-level deferral
    exploration.py  decision trees of long sequences, along a few rollouts
    regrets.py      what a decision costs up to the end of the sequence
    jobs.py         jobs and what their shards hold
    manifest.py     the list of shards that make up a finished labelling
    label_store.py  the labels of a task: read from a store, or made and stored
    inventory.py    the contents of a store: listed, verified, removed
    executors/      where jobs run: this process, local processes, Ray

A shard has the same bytes whichever executor makes it. Only the driver writes: workers read the data, the models and
the work folder under the driver's paths. After an interruption, the same command makes what is missing.
"""

from seqdefer.renames import names_moved

__getattr__ = names_moved(__name__)
