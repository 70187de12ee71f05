"""Experts behind an OpenAI-compatible endpoint (`client`), and their API key (`keys`)."""

from seqdefer.renames import names_moved

__getattr__ = names_moved(__name__)
