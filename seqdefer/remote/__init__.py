"""Experts behind an OpenAI-compatible endpoint (`client`), and how their calls are cancelled (`cancellation`)."""

from seqdefer.renames import names_moved

__getattr__ = names_moved(__name__)
