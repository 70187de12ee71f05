"""Who makes labels: this process, processes of this machine, or a Ray cluster."""
