"""The generation loop: predictor and expert write one batch of sequences, position by position."""

from seqdefer.renames import names_moved

__getattr__ = names_moved(__name__)
