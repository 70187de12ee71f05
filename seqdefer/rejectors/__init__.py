"""Scores of where to defer: networks, confidence rules, the losses they minimise and their training."""

from seqdefer.renames import names_moved

__getattr__ = names_moved(__name__)
