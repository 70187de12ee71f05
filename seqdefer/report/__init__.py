"""What people look at: the HTML report, SVG charts, tables in the terminal."""

from seqdefer.renames import names_moved

__getattr__ = names_moved(__name__)
