"""`seqdefer reproduce`: every table and figure of the paper beside ours, and what became of its claims.

plan      what is run, and what the paper prints
lab       one task: labelled once, measured cell by cell, every cell kept
studies   from cells to rows, lines and contrasts
claims    the paper's statements, judged by intervals
layouts, writing, figures, pages     files for people
"""

from seqdefer.renames import names_moved

__getattr__ = names_moved(__name__)
