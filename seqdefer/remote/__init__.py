"""Experts behind an OpenAI-compatible endpoint, and how their calls are cancelled."""

from seqdefer.renames import names_moved

__getattr__ = names_moved(__name__)
