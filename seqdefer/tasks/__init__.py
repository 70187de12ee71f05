"""Data, the pair and the losses of each problem; nothing about deferral."""
