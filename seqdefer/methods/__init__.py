"""Methods: one row of the paper's table each, with how its rejector is fitted, swept, calibrated and run.

    base.py        the record `Method`, and what a fit may look at
    registry.py    all methods by name
    deferral.py    what a fitted rejector does: sweep, spending, plan
    plans.py       how one batch of requests runs
    timing.py      what writing takes in time

Every other file is a method or a family of methods: it defines `METHODS`, a tuple of records, and is found by that. A
method of another package enters by an entry point of the group `seqdefer.methods`.
"""
