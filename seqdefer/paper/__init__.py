"""The reproduction of the paper: its tables and figures beside ours, its claims, its theory.

theory      bounds and constants as functions of numbers
plan        tasks and settings of each study
lab         one task: labelled once, measured cell by cell
studies     from cells to rows, curves and contrasts
claims      the paper's claims, judged by intervals
reproduce   the job of `seqdefer reproduce`
render/     tables, figures, files
"""

from seqdefer.renames import names_moved

__getattr__ = names_moved(__name__)
