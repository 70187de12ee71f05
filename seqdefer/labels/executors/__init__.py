"""Executors, which run labelling jobs: in this process, in local processes, or on a Ray cluster."""
