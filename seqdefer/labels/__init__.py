"""Labelling: the dear part of learning to defer, cut into jobs, made by any number of workers, kept in shards.

    jobs.py       what a shard holds, and its name: a pure function of the task and some rows
    manifests.py  what a labelling consists of; written when all its shards are there
    labels.py     the labels of a task: found in a store, and what is missing is made
    engines.py    who makes them: this process, processes of this machine, Ray
    processes.py  processes of this machine
    on_ray.py     actors on a Ray cluster
    caches.py     what a store holds: listed, verified, removed

Whoever makes a shard, its bytes are the same. The driver alone writes: workers need to read the data, the models and
the work folder, under the same paths as the driver, and no disk is shared for writing. Whatever is killed, the same
command makes what is not there yet.
"""

from seqdefer.renames import names_moved

__getattr__ = names_moved(__name__)
