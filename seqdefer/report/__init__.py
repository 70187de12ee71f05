"""The report of a run in HTML, its charts in SVG, and tables for the terminal."""

from seqdefer.renames import names_moved

__getattr__ = names_moved(__name__)
